"""What is missing so that a GCP project is heard: looked at with the service's own credentials, changing nothing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from service.clouds.gcp import operation_list, subscription_worker
from service.clouds.gcp.google_calls import (
    LOGGING,
    PROJECTS,
    PUBSUB,
    GoogleCaller,
    GoogleRefuses,
    endpoint,
    make_caller,
)
from service.clouds.gcp.operation_list import filter_since, make_lister
from service.clouds.gcp.push_tokens import KeysUnknown, fetch_keys
from service.clouds.lacks import Lack, OwnView, advice, clock_finding, missing
from service.settings import ServiceSettings

CALL_S = 5.0
CONSUME = "pubsub.subscriptions.consume"
TO_LIST = ("compute.globalOperations.list", "compute.zoneOperations.list")
PUBLISHER, PUBSUB_ITSELF = "roles/pubsub.publisher", "gcp-sa-pubsub.iam.gserviceaccount.com"
WANTED = "compute.instances.preempted"
LATE = "preemptions that the node itself does not hear are not known until it is silent"
_CREDENTIALS = "run the service as an account of the project, or set GOOGLE_APPLICATION_CREDENTIALS"


def look_at_subscription(
    settings: ServiceSettings, now: datetime, own: OwnView, *, caller: Callable[[], GoogleCaller] = make_caller
) -> list[Lack]:
    """Of the channel gcp-pubsub. Never raises."""
    name = settings.gcp_subscription
    if name is None:
        return _keys(settings.gcp_certs_url)
    found: list[Lack] = []
    url = f"{endpoint(settings, PUBSUB)}/v1/{name}"
    try:
        call = caller()
        answer = call("POST", f"{url}:testIamPermissions", {"permissions": [CONSUME]}, timeout_s=CALL_S)
        found += clock_finding(answer.date, now, "Google")
        if CONSUME not in (answer.fields.get("permissions") or []):
            found.append(missing(f"permission: {CONSUME} on {name}", LATE, "grant roles/pubsub.subscriber on it"))
        subscription = call("GET", url, timeout_s=CALL_S).fields
    except GoogleRefuses as refused:
        return [*found, _refused(refused, name)]
    except Exception as error:
        return [*found, _unasked(error)]
    found += of_subscription(name, subscription)
    topic = str(subscription.get("topic"))
    dead = str((subscription.get("deadLetterPolicy") or {}).get("deadLetterTopic") or "")
    sinks, unseen = _sinks(settings, call, name)
    found += unseen or of_sinks(sinks, name.split("/")[1], topic)
    writers = [str(sink.get("writerIdentity", "")) for sink in sinks if _fills(sink, topic)]
    found += _publishers(settings, call, topic, writers)
    return found + _publishers(settings, call, dead, [PUBSUB_ITSELF])


def look_at_operations(
    settings: ServiceSettings,
    now: datetime,
    own: OwnView,
    *,
    lister: Callable[[ServiceSettings], Any] = make_lister,
    caller: Callable[[], GoogleCaller] = make_caller,
) -> list[Lack]:
    """Of the channel gcp-operations. Never raises."""
    project = settings.gcp_project
    if project is None:
        return []
    from google.api_core.exceptions import Forbidden, NotFound

    try:
        lister(settings)(project, filter_since(now))
    except Forbidden:
        mend = "grant a role with it, as deploy/terraform/gcp does"
        return [missing(f"permission: {each} on project {project}", LATE, mend) for each in _not_held(settings, caller)]
    except NotFound:
        return [missing(f"project: there is no {project}", LATE, "name another in LIVER_SERVICE_GCP_PROJECT")]
    except Exception as error:
        return [_unasked(error)]
    return []


def _not_held(settings: ServiceSettings, caller: Callable[[], GoogleCaller]) -> Iterable[str]:
    """Of what listing operations needs, what the service has not; all of it where Google does not say. Nobody needs a
    permission to ask for his own."""
    url = f"{endpoint(settings, PROJECTS)}/v3/projects/{settings.gcp_project}:testIamPermissions"
    try:
        answer = caller()("POST", url, {"permissions": list(TO_LIST)}, timeout_s=CALL_S)
    except Exception:
        # The interface may be turned off in the project.
        return TO_LIST
    held = answer.fields.get("permissions") or []
    return [name for name in TO_LIST if name not in held] or TO_LIST


def _keys(url: str) -> list[Lack]:
    """Where nothing is pulled and Pub/Sub pushes: whether Google's keys can be had."""
    try:
        fetch_keys(url)
    except KeysUnknown as error:
        why = "no push can be believed: each is answered with 503 and comes again"
        return [missing(f"keys of Google: {error}", why, "let the service reach LIVER_SERVICE_GCP_CERTS_URL")]
    return []


def of_subscription(name: str, subscription: Any) -> list[Lack]:
    """What its own settings lack. Pure."""
    found = []
    if subscription.get("topic") == "_deleted-topic_":
        found.append(missing(f"topic of {name}: it was deleted", LATE, "make the subscription again, with a topic"))
    if (subscription.get("pushConfig") or {}).get("pushEndpoint"):
        what = f"{name}: it pushes, and is pulled by this service as well"
        found.append(
            missing(what, "Pub/Sub refuses pulls of it", "end one: pushConfig, or LIVER_SERVICE_GCP_SUBSCRIPTION")
        )
    if not (subscription.get("deadLetterPolicy") or {}).get("deadLetterTopic"):
        why = "a message that cannot be stored comes again until it is too old"
        found.append(missing(f"dead letter topic of {name}", why, "set deadLetterPolicy"))
    if subscription.get("expirationPolicy", {"ttl": "the usual"}).get("ttl"):
        why = "Pub/Sub deletes it once nobody has pulled for so long, 31 days by default"
        found.append(advice(f"{name}: it expires", why, "set the expiration policy to never"))
    return found


def of_sinks(sinks: Iterable[Mapping[str, Any]], project: str, topic: str) -> list[Lack]:
    """Whether one of the project's sinks sends what the service wants to the topic. Pure."""
    if any(_fills(sink, topic) for sink in sinks):
        return []
    mend = "make a log sink with the filter of deploy/terraform/gcp/sink-filter.txt"
    return [missing(f"sink: none of project {project} sends {WANTED} to {topic}", LATE, mend)]


def of_publishers(policy: Mapping[str, Any], topic: str, writers: Iterable[str]) -> list[Lack]:
    """Which of these accounts, each by its name or the end of it, the topic's own policy does not let publish. Pure. A
    role of the whole project would do as well, and is not seen here."""
    roles = policy.get("bindings") or []
    members = [str(one) for each in roles if each.get("role") == PUBLISHER for one in each.get("members") or []]
    return [
        advice(
            f"permission: {writer or 'the account of the sink'} is no publisher of {topic}",
            "unless a role of the whole project lets it, what it sends there is lost",
            f"grant {PUBLISHER} on the topic, as deploy/terraform/gcp does",
        )
        for writer in writers
        if not any(member.endswith(writer) for member in members)
    ]


def _fills(sink: Mapping[str, Any], topic: str) -> bool:
    is_ours = sink.get("destination") == f"pubsub.googleapis.com/{topic}" and not sink.get("disabled")
    return is_ours and (not sink.get("filter") or WANTED in sink["filter"])


def _sinks(settings: ServiceSettings, call: GoogleCaller, name: str) -> tuple[Sequence[Mapping[str, Any]], list[Lack]]:
    """The project's sinks, and why they cannot be seen where they cannot."""
    project = name.split("/")[1]
    url = f"{endpoint(settings, LOGGING)}/v2/projects/{project}/sinks"
    try:
        return call("GET", url, timeout_s=CALL_S).fields.get("sinks") or [], []
    except GoogleRefuses as refused:
        what = f"sink: cannot be seen ({refused}); logging.sinks.list on project {project} would show it"
        return [], [advice(what, "nobody knows whether the log reaches the topic", "grant logging.sinks.list")]
    except Exception as error:
        return [], [_unasked(error)]


def _publishers(settings: ServiceSettings, call: GoogleCaller, topic: str, writers: Sequence[str]) -> list[Lack]:
    """What the policy of the topic lacks, where there is one and somebody writes to it."""
    if not topic.startswith("projects/") or not writers:
        return []
    try:
        policy = call("GET", f"{endpoint(settings, PUBSUB)}/v1/{topic}:getIamPolicy", timeout_s=CALL_S).fields
    except GoogleRefuses as refused:
        if refused.status == 404:
            return [missing(f"topic: there is no {topic}", LATE, "make it, as deploy/terraform/gcp does")]
        what = f"permission: pubsub.topics.getIamPolicy on {topic} ({refused})"
        return [advice(what, "nobody knows who may publish there", "grant it, as deploy/terraform/gcp does")]
    except Exception as error:
        return [_unasked(error)]
    return of_publishers(policy, topic, writers)


def _refused(refused: GoogleRefuses, name: str) -> Lack:
    if refused.status == 404:
        return missing(f"subscription: there is no {name}", LATE, "make it, as deploy/terraform/gcp does")
    if refused.status == 403:
        mend = "grant roles/pubsub.subscriber and roles/pubsub.viewer on it"
        return missing(f"permission: pubsub.subscriptions.get on {name}", "its settings cannot be checked", mend)
    return missing(f"Pub/Sub: {refused}", LATE, "see what Google says")


def _unasked(error: Exception) -> Lack:
    if type(error).__name__ in ("DefaultCredentialsError", "RefreshError"):
        return missing(f"credentials: {error}", LATE, _CREDENTIALS)
    return missing(f"Google cannot be asked: {type(error).__name__}: {error}", LATE, "see the network and the endpoint")


OFF = {"gcp-pubsub": subscription_worker.OFF, "gcp-operations": operation_list.OFF}
