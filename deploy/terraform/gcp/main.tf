# What a GCP project needs so that the control service hears of its machines: a sink of the system event log, a topic, a
# subscription with a dead letter topic, and service accounts. See docs/gcp.md.

terraform {
  required_version = ">= 1.5"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 5.20, < 8.0"
    }
  }
}

variable "project" {
  description = "Id of the project that the machines are in."
  type        = string
}

variable "name" {
  description = "Beginning of every name here; one for each installation in a project."
  type        = string
  default     = "liver"
}

variable "push_endpoint" {
  description = "https address of the service's push endpoint. Empty: the service pulls, and needs no address that Google reaches."
  type        = string
  default     = ""
}

variable "network" {
  description = "Network of the nodes. Empty: no firewall rule is made for them."
  type        = string
  default     = ""
}

locals {
  methods = ["preempted", "hostError", "terminateOnHostMaintenance", "guestTerminate", "baremetalCaretakerPreempted"]
}

data "google_project" "this" {
  project_id = var.project
}

resource "google_pubsub_topic" "notices" {
  project                    = var.project
  name                       = "${var.name}-notices"
  message_retention_duration = "3600s"
}

resource "google_pubsub_topic" "dead" {
  project = var.project
  name    = "${var.name}-notices-dead"
}

resource "google_logging_project_sink" "notices" {
  project                = var.project
  name                   = "${var.name}-notices"
  destination            = "pubsub.googleapis.com/${google_pubsub_topic.notices.id}"
  unique_writer_identity = true
  filter = templatefile("${path.module}/sink-filter.txt", {
    project = var.project
    methods = join(" OR ", [for method in local.methods : "\"compute.instances.${method}\""])
  })
}

resource "google_pubsub_topic_iam_member" "sink_publishes" {
  project = var.project
  topic   = google_pubsub_topic.notices.name
  role    = "roles/pubsub.publisher"
  member  = google_logging_project_sink.notices.writer_identity
}

# Who the control service is. Nothing else runs as it.
resource "google_service_account" "service" {
  project      = var.project
  account_id   = "${var.name}-service"
  display_name = "LiveR control service"
}

# Who nodes are: an account without any role. The default one may often edit the whole project.
resource "google_service_account" "node" {
  project      = var.project
  account_id   = "${var.name}-node"
  display_name = "LiveR nodes, which read only their own metadata"
}

# Whose token Pub/Sub shows at the push endpoint.
resource "google_service_account" "push" {
  project      = var.project
  account_id   = "${var.name}-push"
  display_name = "Pub/Sub push to the LiveR control service"
}

resource "google_service_account_iam_member" "pubsub_makes_tokens" {
  service_account_id = google_service_account.push.name
  role               = "roles/iam.serviceAccountTokenCreator"
  member             = "serviceAccount:service-${data.google_project.this.number}@gcp-sa-pubsub.iam.gserviceaccount.com"
}

resource "google_pubsub_subscription" "notices" {
  project                    = var.project
  name                       = "${var.name}-notices"
  topic                      = google_pubsub_topic.notices.id
  ack_deadline_seconds       = 30
  message_retention_duration = "3600s"

  expiration_policy {
    ttl = ""
  }

  retry_policy {
    minimum_backoff = "1s"
    maximum_backoff = "30s"
  }

  dead_letter_policy {
    dead_letter_topic     = google_pubsub_topic.dead.id
    max_delivery_attempts = 5
  }

  dynamic "push_config" {
    for_each = var.push_endpoint == "" ? [] : [var.push_endpoint]
    content {
      push_endpoint = push_config.value
      oidc_token {
        service_account_email = google_service_account.push.email
        audience              = push_config.value
      }
    }
  }
}

resource "google_pubsub_subscription" "dead" {
  project                    = var.project
  name                       = "${var.name}-notices-dead"
  topic                      = google_pubsub_topic.dead.id
  message_retention_duration = "604800s"

  expiration_policy {
    ttl = ""
  }
}

resource "google_pubsub_topic_iam_member" "pubsub_gives_up" {
  project = var.project
  topic   = google_pubsub_topic.dead.name
  role    = "roles/pubsub.publisher"
  member  = "serviceAccount:service-${data.google_project.this.number}@gcp-sa-pubsub.iam.gserviceaccount.com"
}

resource "google_pubsub_subscription_iam_member" "pubsub_takes_over" {
  project      = var.project
  subscription = google_pubsub_subscription.notices.name
  role         = "roles/pubsub.subscriber"
  member       = "serviceAccount:service-${data.google_project.this.number}@gcp-sa-pubsub.iam.gserviceaccount.com"
}

resource "google_pubsub_subscription_iam_member" "service_pulls" {
  project      = var.project
  subscription = google_pubsub_subscription.notices.name
  role         = "roles/pubsub.subscriber"
  member       = google_service_account.service.member
}

# `liver cloud check` sees whether the subscription has what it needs.
resource "google_pubsub_subscription_iam_member" "service_looks" {
  project      = var.project
  subscription = google_pubsub_subscription.notices.name
  role         = "roles/pubsub.viewer"
  member       = google_service_account.service.member
}

# And who may publish to the topics.
resource "google_project_iam_custom_role" "topics" {
  project     = var.project
  role_id     = "${replace(var.name, "-", "_")}_topics"
  title       = "LiveR: see who may publish to a topic"
  permissions = ["pubsub.topics.getIamPolicy"]
}

resource "google_pubsub_topic_iam_member" "service_looks" {
  for_each = { notices = google_pubsub_topic.notices.name, dead = google_pubsub_topic.dead.name }
  project  = var.project
  topic    = each.value
  role     = google_project_iam_custom_role.topics.id
  member   = google_service_account.service.member
}

# The list of operations shows preemptions also where the log is late.
resource "google_project_iam_custom_role" "operations" {
  project     = var.project
  role_id     = "${replace(var.name, "-", "_")}_operations"
  title       = "LiveR: read operations of Compute Engine"
  permissions = ["compute.globalOperations.list", "compute.zoneOperations.list", "logging.sinks.list"]
}

resource "google_project_iam_member" "service_reads_operations" {
  project = var.project
  role    = google_project_iam_custom_role.operations.id
  member  = google_service_account.service.member
}

output "subscription" {
  description = "The subscription that the service pulls, or that pushes to it."
  value       = google_pubsub_subscription.notices.id
}

output "service_account" {
  description = "Account for the machine that runs the control service."
  value       = google_service_account.service.email
}

# Ranks, stores and stream relays (liver-agent --relay-ports) of machines with the nodes' account reach each other. This
# rule lets nobody else in; see that no other rule of the network does: what they send is not encrypted, and gloo and the
# stores ask nobody who they are.
resource "google_compute_firewall" "nodes" {
  count                   = var.network == "" ? 0 : 1
  project                 = var.project
  name                    = "${var.name}-nodes"
  network                 = var.network
  direction               = "INGRESS"
  source_service_accounts = [google_service_account.node.email]
  target_service_accounts = [google_service_account.node.email]

  allow {
    protocol = "tcp"
  }
}

output "node_account" {
  description = "Account for the machines of nodes."
  value       = google_service_account.node.email
}

output "push_account" {
  description = "Account whose token comes with each push."
  value       = google_service_account.push.email
}
