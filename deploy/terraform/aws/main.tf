# What an AWS account needs so that the control service hears of its machines: EventBridge rules, a queue, a dead letter
# queue, and the policy of the service. Nodes need no permission: they read their own metadata. See docs/aws.md.

terraform {
  required_version = ">= 1.5"
  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.40, < 7.0"
    }
  }
}

variable "name" {
  description = "Beginning of every name here; one for each installation in a region."
  type        = string
  default     = "liver"
}

variable "auto_scaling_group_arns" {
  description = "Groups whose lifecycle hooks the service extends and completes. Without any it gets no such permission."
  type        = list(string)
  default     = []
}

variable "tags" {
  description = "Tags of everything that can have some."
  type        = map(string)
  default     = {}
}

variable "vpc_id" {
  description = "VPC of the nodes of one job. Empty: no security group is made for them."
  type        = string
  default     = ""
}

locals {
  # One file each; the event pattern is what it contains.
  rules = toset([
    "spot-interruption", "rebalance", "state-change", "reservation", "capacity-block", "lifecycle", "health",
  ])
  # A warning that is older than that is of no use. By default EventBridge goes on for 24 hours.
  event_age_s = 60
}

resource "aws_sqs_queue" "dead" {
  name                      = "${var.name}-notices-dead"
  message_retention_seconds = 1209600
  sqs_managed_sse_enabled   = true
  tags                      = var.tags
}

resource "aws_sqs_queue" "notices" {
  name                       = "${var.name}-notices"
  message_retention_seconds  = 3600
  visibility_timeout_seconds = 30
  receive_wait_time_seconds  = 20
  sqs_managed_sse_enabled    = true
  tags                       = var.tags
  redrive_policy = jsonencode({
    deadLetterTargetArn = aws_sqs_queue.dead.arn
    maxReceiveCount     = 5
  })
}

resource "aws_cloudwatch_event_rule" "notices" {
  for_each      = local.rules
  name          = "${var.name}-${each.key}"
  description   = "To the queue of the LiveR control service"
  event_pattern = file("${path.module}/pattern-${each.key}.json")
  tags          = var.tags
}

resource "aws_cloudwatch_event_target" "notices" {
  for_each  = local.rules
  rule      = aws_cloudwatch_event_rule.notices[each.key].name
  target_id = "queue"
  arn       = aws_sqs_queue.notices.arn

  retry_policy {
    maximum_event_age_in_seconds = local.event_age_s
    maximum_retry_attempts       = 60
  }

  dead_letter_config {
    arn = aws_sqs_queue.dead.arn
  }
}

resource "aws_sqs_queue_policy" "notices" {
  for_each  = { notices = aws_sqs_queue.notices, dead = aws_sqs_queue.dead }
  queue_url = each.value.id
  policy = templatefile("${path.module}/queue-policy.json", {
    queue_arn = each.value.arn
    rule_arns = jsonencode([for rule in aws_cloudwatch_event_rule.notices : rule.arn])
  })
}

resource "aws_iam_policy" "service" {
  name        = "${var.name}-service"
  description = "What the LiveR control service does in this account"
  tags        = var.tags
  policy = templatefile("${path.module}/service-policy.json", {
    queue_arn = aws_sqs_queue.notices.arn
    rule_arns = jsonencode([for rule in aws_cloudwatch_event_rule.notices : rule.arn])
  })
}

resource "aws_iam_policy" "lifecycle" {
  count       = length(var.auto_scaling_group_arns) > 0 ? 1 : 0
  name        = "${var.name}-service-lifecycle"
  description = "Lifecycle hooks of the groups whose machines run LiveR nodes"
  tags        = var.tags
  policy = templatefile("${path.module}/lifecycle-policy.json", {
    group_arns = jsonencode(var.auto_scaling_group_arns)
  })
}

# For the machines of nodes. Ranks, stores and stream relays (liver-agent --relay-ports) of one job reach each other, and
# nobody else reaches them: what they send is not encrypted, and gloo and the stores ask nobody who they are. EFA has no
# ports. One group a job keeps the nodes of jobs apart.
resource "aws_security_group" "nodes" {
  count       = var.vpc_id == "" ? 0 : 1
  name        = "${var.name}-nodes"
  description = "Nodes of a LiveR job reach each other"
  vpc_id      = var.vpc_id
  tags        = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "nodes" {
  count                        = length(aws_security_group.nodes)
  security_group_id            = aws_security_group.nodes[0].id
  referenced_security_group_id = aws_security_group.nodes[0].id
  ip_protocol                  = "-1"
}

# EFA asks for a rule to the group itself, also beside one to everywhere.
resource "aws_vpc_security_group_egress_rule" "nodes" {
  count                        = length(aws_security_group.nodes)
  security_group_id            = aws_security_group.nodes[0].id
  referenced_security_group_id = aws_security_group.nodes[0].id
  ip_protocol                  = "-1"
}

# To the control service, checkpoints and data.
resource "aws_vpc_security_group_egress_rule" "elsewhere" {
  count             = length(aws_security_group.nodes)
  security_group_id = aws_security_group.nodes[0].id
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
}

output "node_security_group_id" {
  description = "For the machines of nodes; null without vpc_id."
  value       = one(aws_security_group.nodes[*].id)
}

output "queue_url" {
  description = "The queue that the service reads."
  value       = aws_sqs_queue.notices.url
}

output "dead_letter_queue_url" {
  description = "Where messages end that nobody could handle. It should be empty."
  value       = aws_sqs_queue.dead.url
}

output "service_policy_arns" {
  description = "Policies for the role that the control service runs with."
  value       = concat([aws_iam_policy.service.arn], aws_iam_policy.lifecycle[*].arn)
}
