"""What an AWS account tells: EventBridge sends it to a queue, `queue_worker` reads that, `events` says what it means.

`hooks` lets an Auto Scaling group wait until jobs have left a machine.
"""
