"""Who is refused before anything is looked up: a line of the design's section on security each."""

import pytest

from muster.web.guard import HEADERS, Place, is_door, is_open, refusal
from muster.web.serve import _in_address

HERE = Place(port=8765)
ACTING = Place(port=8765, allows_actions=True)
OURS = {"host": "127.0.0.1:8765"}
ACTION = {**OURS, "x-muster": "1", "content-type": "application/json; charset=utf-8"}
ACT = "/api/run/0123456789ab/act"


def status(place: Place, method: str, path: str, headers: dict[str, str]) -> int | None:
    found = refusal(place, method, path, headers)
    return None if found is None else found.status


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8765", "localhost:8765", "LOCALHOST:8765", "[::1]:8765"]
)
def test_names_of_this_machine_are_known(host: str) -> None:
    assert status(HERE, "GET", "/", {"host": host}) is None


@pytest.mark.parametrize(
    "host",
    ["", "evil.example:8765", "127.0.0.1", "127.0.0.1:8766", "127.0.0.1.evil.example:8765",
     "localhost:8765.evil.example", "0.0.0.0:8765", "[::1]", "127.0.0.1:", "x@127.0.0.1:8765"],
)  # fmt: skip
def test_any_other_host_is_misdirected(host: str) -> None:
    """DNS rebinding: a page elsewhere makes its own name mean 127.0.0.1."""
    assert status(HERE, "GET", "/", {"host": host}) == 421
    assert status(HERE, "POST", "/login", {"host": host}) == 421


def test_a_socket_is_reached_by_any_port_but_by_no_other_name() -> None:
    place = Place(port=None)
    assert status(place, "GET", "/", {"host": "localhost:9999"}) is None
    assert status(place, "GET", "/", {"host": "evil.example:9999"}) == 421


def test_a_public_name_is_known_where_the_user_has_said_it() -> None:
    place = Place(port=8765, host="node7.example")
    assert status(place, "GET", "/", {"host": "node7.example:8765"}) is None
    assert status(HERE, "GET", "/", {"host": "node7.example:8765"}) == 421
    sixth = Place(port=8765, host=_in_address("2001:DB8::7"))
    assert status(sixth, "GET", "/", {"host": "[2001:db8::7]:8765"}) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js", "/run/0123456789ab/tasks"])
def test_what_is_not_named_is_not_allowed(method: str, path: str) -> None:
    """Ray blocked POST and PUT, and forgot DELETE."""
    found = refusal(ACTING, method, path, ACTION)
    assert found is not None and found.status == 405
    assert found.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_an_action_can_only_be_posted_and_only_where_actions_are_allowed(method: str) -> None:
    assert status(HERE, "POST", ACT, ACTION) == 405
    assert status(ACTING, "POST", ACT, ACTION) is None
    assert status(ACTING, method, ACT, ACTION) == 405


def test_an_action_needs_a_header_and_a_type_that_no_form_has() -> None:
    assert status(ACTING, "POST", ACT, {**ACTION, "x-muster": ""}) == 403
    assert status(ACTING, "POST", ACT, {**ACTION, "content-type": "text/plain"}) == 415
    assert status(ACTING, "POST", ACT, OURS) == 403


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "https://127.0.0.1:8765", "http://127.0.0.1:8766",
     "http://localhost:8765", "http://127.0.0.1:8765.evil.example", ""],
)  # fmt: skip
@pytest.mark.parametrize(("method", "path"), [("GET", "/api/runs"), ("POST", "/login")])
def test_an_origin_that_is_sent_must_be_ours(origin: str, method: str, path: str) -> None:
    assert status(HERE, method, path, {**OURS, "origin": origin}) == 403
    assert status(HERE, method, path, {**OURS, "origin": "http://127.0.0.1:8765"}) is None


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything"])
def test_a_request_of_another_site_is_refused(site: str) -> None:
    """Another port of this machine is the same site, and another program's."""
    for path in ("/api/runs", "/api/stream", "/run/0123456789ab", "/static/app.js"):
        assert status(HERE, "GET", path, {**OURS, "sec-fetch-site": site}) == 403
    assert status(HERE, "POST", "/login", {**OURS, "sec-fetch-site": site}) == 403
    assert status(HERE, "GET", "/", {**OURS, "sec-fetch-site": site}) is None  # only the door


def test_a_typed_address_is_a_page_and_never_data() -> None:
    typed = {**OURS, "sec-fetch-site": "none"}
    assert status(HERE, "GET", "/run/0123456789ab", typed) is None
    assert status(HERE, "GET", "/api/runs", typed) == 403
    assert status(HERE, "GET", "/api/runs", {**OURS, "sec-fetch-site": "same-origin"}) is None


def test_without_a_token_there_is_the_door_and_nothing_of_any_run() -> None:
    assert is_door("GET", "/") and not is_door("GET", "/run/0123456789ab")
    assert is_open("POST", "/login") and is_open("GET", "/static/app.js")
    for path in ("/", "/api/runs", "/run/0123456789ab/file/logs/a", "/login", "/api/static/x"):
        assert not is_open("GET", path)
    assert not is_open("POST", "/csp-report")  # it is written where the owner reads it


def test_a_page_may_load_nothing_but_what_comes_from_here() -> None:
    policy = dict(
        part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert HEADERS["x-content-type-options"] == "nosniff"
    assert HEADERS["referrer-policy"] == "no-referrer"
    assert HEADERS["cross-origin-opener-policy"] == HEADERS["cross-origin-resource-policy"]
    assert HEADERS["cache-control"] == "no-store"
