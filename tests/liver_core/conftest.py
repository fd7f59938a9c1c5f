"""What tests with real ranks share: the corpus, built once a session."""

import pytest

from tests.cluster.real_ranks_model import build_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a small indexed dataset."""
    return build_corpus(tmp_path_factory.mktemp("corpus"))
