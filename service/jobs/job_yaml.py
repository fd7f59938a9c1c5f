"""The text of a job file as fields. JSON is YAML, so one safe reader serves both. Pure."""

import yaml
from yaml.nodes import MappingNode, ScalarNode

from agent.protocol.errors import FieldProblem
from agent.protocol.jobfile_check import JobFileError

_TEXT = "tag:yaml.org,2002:str"
_GUESSED = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "timestamp")}


def read_fields(text: bytes) -> object:
    """What the text holds. Raises JobFileError where it is no YAML, with the place."""
    try:
        loader = yaml.SafeLoader(text.decode())
        try:
            node = loader.get_single_node()
            _keep_environment_as_written(node)
            return loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise JobFileError((FieldProblem(field="(whole)", rule=f"must be YAML or JSON: {error}"[:500]),)) from error


def _keep_environment_as_written(root: object) -> None:
    """An environment holds text: `010`, `1.10`, `12:30` and `yes` reach the ranks as they stand in the file, not as the
    number or the truth value that YAML makes of them."""
    for name, part in root.value if isinstance(root, MappingNode) else ():
        if isinstance(name, ScalarNode) and name.value == "environment" and isinstance(part, MappingNode):
            for _, value in part.value:
                if isinstance(value, ScalarNode) and value.tag in _GUESSED:
                    value.tag = _TEXT
