"""What a user writes: a `TrainingJob` (`job`), fed by the data cursor (`cursor`); `gpt` is the reference job."""
