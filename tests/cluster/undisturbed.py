"""What the data cursor alone says of a run that nothing disturbed."""


def undisturbed_samples(steps: int, micro_batch: int = 2, global_batch: int = 8) -> dict[int, tuple[int, int]]:
    """Step -> samples consumed and chained digest, by one rank that takes every batch whole."""
    from liver_core.layout import Coordinates
    from liver_core.training.cursor import DataCursor, chained, digest_part

    cursor, digest, expected = DataCursor(0, global_batch, micro_batch), 0, {}
    for step in range(1, steps + 1):
        digest = chained(digest, digest_part(step, cursor.batches(0, 1), Coordinates(tp=0, cp=0, dp=0, pp=0)))
        cursor = cursor.advanced()
        expected[step] = (cursor.consumed, digest)
    return expected
