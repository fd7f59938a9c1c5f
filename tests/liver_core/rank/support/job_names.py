"""Entry points of the jobs in `stream_jobs`, which imports Megatron: what only names a job need not wait for that."""

JOBS = {
    "adam": "liver_core.training.gpt:GptJob",
    "sgd": "tests.liver_core.rank.support.stream_jobs:SgdJob",
    "lion": "tests.liver_core.rank.support.stream_jobs:LionJob",
    "counts in the group": "tests.liver_core.rank.support.stream_jobs:GroupCountJob",
    "two optimizers": "tests.liver_core.rank.support.stream_jobs:TwoOptimizersJob",
    "dropout": "tests.liver_core.rank.support.stream_jobs:DropoutJob",
    "fused": "tests.liver_core.rank.support.stream_jobs:FusedJob",
    "wordy": "tests.liver_core.rank.support.stream_jobs:WordyJob",
    "very wordy": "tests.liver_core.rank.support.stream_jobs:VeryWordyJob",
}
"""By what is special about the job, mostly its optimizer."""
