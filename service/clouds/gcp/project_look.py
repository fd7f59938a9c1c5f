"""What is missing so that a GCP project is heard: looked at with the service's own credentials, changing nothing."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

from service.clouds.gcp import operation_list, subscription_worker
from service.clouds.gcp.google_calls import LOGGING, PUBSUB, GoogleCaller, GoogleRefuses, endpoint, make_caller
from service.clouds.gcp.operation_list import filter_since, make_lister
from service.clouds.lacks import Lack, advice, clock_finding, missing
from service.settings import ServiceSettings

CALL_S = 5.0
CONSUME = "pubsub.subscriptions.consume"
LATE = "preemptions that the node itself does not hear are not known until it is silent"
_CREDENTIALS = "run the service as an account of the project, or set GOOGLE_APPLICATION_CREDENTIALS"


def look_at_subscription(
    settings: ServiceSettings, now: datetime, *, caller: Callable[[], GoogleCaller] = make_caller
) -> list[Lack]:
    """Of the channel gcp-pubsub. Never raises."""
    name = settings.gcp_subscription
    if name is None:
        return []
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
    return found + of_subscription(name, subscription) + _sinks(settings, call, name, str(subscription.get("topic")))


def look_at_operations(
    settings: ServiceSettings, now: datetime, *, lister: Callable[[ServiceSettings], Any] = make_lister
) -> list[Lack]:
    """Of the channel gcp-operations. Never raises."""
    project = settings.gcp_project
    if project is None:
        return []
    from google.api_core.exceptions import Forbidden, NotFound

    try:
        lister(settings)(project, filter_since(now))
    except Forbidden:
        needed = "compute.globalOperations.list and compute.zoneOperations.list"
        mend = "grant a role with them, as deploy/terraform/gcp does"
        return [missing(f"permission: {needed} on project {project}", LATE, mend)]
    except NotFound:
        return [missing(f"project: there is no {project}", LATE, "name another in LIVER_SERVICE_GCP_PROJECT")]
    except Exception as error:
        return [_unasked(error)]
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


def _sinks(settings: ServiceSettings, call: GoogleCaller, name: str, topic: str) -> list[Lack]:
    project = name.split("/")[1]
    url = f"{endpoint(settings, LOGGING)}/v2/projects/{project}/sinks"
    try:
        sinks = call("GET", url, timeout_s=CALL_S).fields.get("sinks") or []
    except GoogleRefuses as refused:
        what = f"sink: cannot be seen ({refused}); logging.sinks.list on project {project} would show it"
        return [advice(what, "nobody knows whether the log reaches the topic", "grant logging.sinks.list")]
    except Exception as error:
        return [_unasked(error)]
    wanted = "compute.instances.preempted"
    for sink in sinks:
        is_ours = sink.get("destination") == f"pubsub.googleapis.com/{topic}" and not sink.get("disabled")
        if is_ours and (not sink.get("filter") or wanted in sink["filter"]):
            return []
    mend = "make a log sink with the filter of deploy/terraform/gcp/sink-filter.txt"
    return [missing(f"sink: none of project {project} sends {wanted} to {topic}", LATE, mend)]


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
