"""What a GCP project tells: its system event log by Pub/Sub, pulled by `subscription_worker` or pushed to `push`; and
its list of operations, read by `operation_list`. `log_entries` says what either means.
"""
