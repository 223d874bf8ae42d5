"""The pure parts of the calls layer, and the small modules below it."""

import enum
import logging
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

import gradwire._rpc.members as who
from gradwire import Options, WorkerInfo, WorkerLostError
from gradwire._rpc.calls import CallsInFlight, Pending
from gradwire._rpc.collectives import Gatherings
from gradwire._rpc.members import Members, Seen
from gradwire._transport.base import Card
from gradwire.events import Event
from gradwire.ids import check_name

FOR_EVER = float("inf")

# Calls in flight


def pending(call: int, to: int = 0, deadline: float = FOR_EVER) -> Pending:
    return Pending(call, to, timeout=0, deadline=deadline, answer=object())


class EachCallLeavesOnce(RuleBasedStateMachine):
    """Calls start and are answered (also twice), expire, or are lost with their worker."""

    calls = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.table = CallsInFlight()
        self.waiting: dict[int, Pending] = {}
        self.left: list[Pending] = []
        self.now = 0.0

    @rule(
        target=calls,
        to=st.integers(0, 3),
        within=st.one_of(st.just(FOR_EVER), st.integers(0, 9)),
    )
    def start(self, to: int, within: float) -> int:
        call = pending(len(self.waiting) + len(self.left), to, self.now + within)
        self.table.started(call)
        self.waiting[call.call] = call
        return call.call

    @rule(call=calls)
    def answer(self, call: int) -> None:
        found = self.table.answered(call)
        assert found is self.waiting.get(call)
        self.gone([] if found is None else [found])

    @rule(passed=st.integers(0, 5))
    def let_time_pass(self, passed: int) -> None:
        self.now += passed
        late = self.table.expired(self.now)
        assert all(call.deadline <= self.now for call in late)
        self.gone(late)
        assert self.table.next_deadline() > self.now

    @rule(worker=st.integers(0, 3))
    def lose(self, worker: int) -> None:
        lost = self.table.worker_lost(worker)
        assert {call.to for call in lost} <= {worker}
        self.gone(lost)
        assert worker not in {call.to for call in self.table}

    def gone(self, calls: list[Pending]) -> None:
        for call in calls:
            assert self.waiting.pop(call.call) is call
            assert call.call not in {p.call for p in self.table}
        self.left += calls

    @invariant()
    def all_that_started_and_did_not_leave_are_there(self) -> None:
        assert list(self.table) == list(self.waiting.values())
        assert len(self.table) == len(self.waiting)

    @invariant()
    def the_next_deadline_is_the_first_of_those_waiting(self) -> None:
        deadlines = [call.deadline for call in self.waiting.values()]
        assert self.table.next_deadline() == min(deadlines, default=FOR_EVER)


TestEachCallLeavesOnce = EachCallLeavesOnce.TestCase


def test_the_table_can_be_emptied_while_it_is_walked() -> None:
    table = CallsInFlight()
    for number in range(3):
        table.started(pending(number))
    assert [table.answered(call.call) for call in table] != [None] * 3
    assert len(table) == 0


@given(st.lists(st.integers(1, 30)))
def test_a_request_is_new_the_first_time_in_any_order(numbers: list[int]) -> None:
    seen = Seen()
    news = [seen.is_new(number) for number in numbers]
    assert news == [n not in numbers[:i] for i, n in enumerate(numbers)]


@given(st.permutations(range(1, 20)))
def test_seen_forgets_numbers_once_there_is_no_gap_below_them(order: list[int]) -> None:
    seen = Seen()
    assert all(seen.is_new(number) for number in order)
    assert seen == Seen(_below=20)


@given(st.sets(st.integers(1, 50)))
def test_seen_keeps_only_what_is_above_a_gap(numbers: set[int]) -> None:
    seen = Seen()
    for number in numbers:
        seen.is_new(number)
    first_gap = next(n for n in range(1, 52) if n not in numbers)
    assert seen == Seen(first_gap, {n for n in numbers if n > first_gap})


def test_seen_with_a_bound_takes_the_oldest_gaps_for_come() -> None:
    seen = Seen(most=3)
    assert all(seen.is_new(number) for number in (2, 4, 5, 7))  # 1 has gone by
    assert not any(seen.is_new(number) for number in (1, 2, 4, 5, 7))
    assert seen.is_new(3)
    assert seen.is_new(6)
    assert seen == Seen(8, most=3)


def test_seen_does_not_look_for_the_oldest_gap_at_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where every other number never comes."""
    sorts = 0

    def counting(numbers: set[int]) -> list[int]:
        nonlocal sorts
        sorts += 1
        return sorted(numbers)

    monkeypatch.setattr(who, "sorted", counting, raising=False)
    seen = Seen(most=1600)
    for number in range(2, 40_000, 2):
        assert seen.is_new(number)
    assert 0 < sorts < 300
    assert 39_999 not in seen
    assert 2 in seen


# Gatherings

events = st.lists(
    st.tuples(st.sampled_from(["part", "gone"]), st.integers(0, 4)), max_size=15
)


@given(st.sets(st.integers(0, 4), min_size=1), events)
def test_a_gathering_completes_when_all_expected_came_or_are_gone(
    expected: set[int], events: list[tuple[str, int]]
) -> None:
    gatherings = Gatherings()
    missing = set(expected)
    parts: dict[int, int] = {}
    waiters: list[int] = []
    for index, (event, worker) in enumerate(events):
        missing.discard(worker)
        if event == "part":
            parts[worker] = index
            waiters.append(index)
            done = gatherings.part_came(
                "key", worker, index, expected=expected, waiter=index
            )
        else:
            if not parts:
                expected = expected - {worker}  # who is there is known to the driver
                missing = set(expected)
            (done,) = gatherings.worker_gone(worker) or [None]
        if done is not None:
            assert missing == set()
            assert (done.parts, done.waiting) == (parts, waiters)
            assert len(gatherings) == 0
            return
        assert missing or not parts


def test_gatherings_under_different_keys_do_not_mix() -> None:
    gatherings = Gatherings()
    both = {0, 1}
    gatherings.part_came("a", 0, "a0", expected=both, waiter=None)
    gatherings.part_came("b", 1, "b1", expected=both, waiter=None)
    a = gatherings.part_came("a", 1, "a1", expected=both, waiter=None)
    assert a is not None
    assert a.parts == {0: "a0", 1: "a1"}
    assert len(gatherings) == 1


def test_one_worker_can_be_the_last_that_several_gatherings_waited_for() -> None:
    gatherings = Gatherings()
    for key in ("a", "b"):
        gatherings.part_came(key, 0, key, expected={0, 1}, waiter=key)
    gatherings.part_came("c", 0, "c", expected={0, 1, 2}, waiter="c")
    done = gatherings.worker_gone(1)
    assert [gathering.waiting for gathering in done] == [["a"], ["b"]]
    assert len(gatherings) == 1


def test_a_part_of_a_worker_that_is_gone_since_is_kept() -> None:
    gatherings = Gatherings()
    gatherings.part_came("key", 1, "last words", expected={0, 1}, waiter=None)
    assert gatherings.worker_gone(1) == []
    done = gatherings.part_came("key", 0, "mine", expected={0}, waiter=None)
    assert done is not None
    assert done.parts == {0: "mine", 1: "last words"}


def test_whom_a_gathering_expects_is_settled_by_its_first_part() -> None:
    gatherings = Gatherings()
    there = {0, 1}
    gatherings.part_came("key", 0, "", expected=there, waiter=None)
    there.add(2)
    assert gatherings.part_came("key", 1, "", expected=there, waiter=None) is not None


# Members


def card(name: str, number: int) -> Card:
    return Card(name=name, id=number)


@pytest.fixture
def members() -> Members:
    members = Members()
    for number, name in enumerate(["ps", "trainer"]):
        assert members.add(card(name, number))
    return members


class Role(str, enum.Enum):
    PS = "ps"


@pytest.mark.parametrize("to", ["ps", 0, WorkerInfo("ps", 0), Role.PS])
def test_a_member_is_found_by_name_id_or_info(members: Members, to: object) -> None:
    assert members.find(to) == card("ps", 0)


@pytest.mark.parametrize("to", ["nobody", 7, WorkerInfo("nobody", 7)])
def test_a_stranger_is_named_together_with_who_is_there(
    members: Members, to: object
) -> None:
    with pytest.raises(ValueError, match=r"\['ps', 'trainer'\]") as caught:
        members.find(to)
    assert repr(to) in str(caught.value)


@pytest.mark.parametrize("to", [None, 0.0, True, b"ps", ("ps",)])
def test_what_names_no_worker_is_refused(members: Members, to: object) -> None:
    with pytest.raises(TypeError, match="give a name, an id or a WorkerInfo") as caught:
        members.find(to)
    assert repr(to) in str(caught.value)


@pytest.mark.parametrize("to", ["ps", 0, WorkerInfo("ps", 0)])
def test_a_member_that_is_gone_is_named_with_the_reason(
    members: Members, to: object
) -> None:
    assert members.remove(0, "it was unplugged") == card("ps", 0)
    with pytest.raises(WorkerLostError, match="'ps': it was unplugged"):
        members.find(to)


def test_a_name_is_free_again_once_its_worker_is_gone(members: Members) -> None:
    members.remove(0, "left")
    assert members.add(card("ps", 2))
    assert members.find("ps").id == 2
    with pytest.raises(WorkerLostError):
        members.find(0)


def test_an_id_is_never_used_twice(members: Members) -> None:
    assert not members.add(card("impostor", 1))
    members.remove(1, "left")
    assert not members.add(card("impostor", 1))
    assert members.get(1) is None


def test_a_successor_may_come_before_the_loss_is_noticed(members: Members) -> None:
    members.add(card("ps", 2))
    members.remove(0, "lost")
    assert members.find("ps").id == 2


def test_a_member_goes_once(members: Members) -> None:
    assert members.remove(0, "first") is not None
    assert members.remove(0, "second") is None
    assert members.remove(9, "never came") is None


def test_members_are_named_even_when_gone(members: Members) -> None:
    members.remove(0, "left")
    names = [members.name(number) for number in (0, 1, 2)]
    assert names == ["ps", "trainer", "id 2"]
    assert repr(members) == "<Members: ['trainer']>"


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from("abc")), max_size=30
    )
)
def test_members_answer_the_same_by_name_and_by_id(
    steps: list[tuple[bool, int, str]],
) -> None:
    members = Members()
    there: dict[int, str] = {}
    gone: set[int] = set()
    for comes, number, name in steps:
        if not comes:
            assert (members.remove(number, "left") is not None) == (number in there)
            gone |= {number} & there.keys()
            there.pop(number, None)
        elif name not in there.values():
            is_new = number not in there and number not in gone
            assert members.add(card(name, number)) == is_new
            there |= {number: name} if is_new else {}
    assert [c.info for c in members.cards()] == [(there[n], n) for n in sorted(there)]
    for number, name in there.items():
        assert members.find(number) is members.find(name) is members.get(number)


# Events


def test_an_event_reaches_all_who_asked_in_order() -> None:
    heard: list[tuple[str, int]] = []
    event: Event[int] = Event("count")
    event.subscribe(lambda n: heard.append(("first", n)))
    event.subscribe(lambda n: heard.append(("second", n)))
    event.fire(1)
    event.fire(2)
    assert heard == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]


def test_a_callback_can_be_taken_off_the_list_even_twice() -> None:
    heard: list[int] = []
    event: Event[int] = Event("count")
    unsubscribe = event.subscribe(heard.append)
    event.fire(1)
    unsubscribe()
    unsubscribe()
    event.fire(2)
    assert heard == [1]
    assert repr(event) == "<Event count: 0 callbacks>"


def test_a_callback_that_raises_is_logged_and_stops_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[int] = []
    event: Event[int] = Event("count")
    event.subscribe(lambda n: 1 // n)
    event.subscribe(heard.append)
    event.fire(0)
    assert heard == [0]
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("gradwire", logging.ERROR)
    assert "count" in record.getMessage()
    assert "ZeroDivisionError" in caplog.text


def test_a_callback_may_come_and_go_while_the_event_fires() -> None:
    heard: list[str] = []
    event: Event[None] = Event("any")

    def once(_: None) -> None:
        heard.append("once")
        end()
        event.subscribe(lambda _: heard.append("late"))

    end = event.subscribe(once)
    event.subscribe(lambda _: heard.append("always"))
    event.fire(None)
    assert heard == ["once", "always"]
    event.fire(None)
    assert heard == ["once", "always", "always", "late"]


# Options


def variables() -> list[str]:
    not_from_env = {"allow", "device_maps", "serializer"}  # objects, not text
    return [n for n in Options.names() if n not in not_from_env]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Options.names():
        monkeypatch.delenv(f"GRADWIRE_{name.upper()}", raising=False)


TEXTS = {
    "timeout": ("1.5", 1.5),
    "join_timeout": ("7", 7.0),
    "heartbeat": ("0", 0.0),
    "host_heartbeat": ("5", 5.0),
    "torch_threads": ("3", 3),
    "threads": ("3", 3),
    "bind": ("10.0.0.1", "10.0.0.1"),
    "advertise": ("node1", "node1"),
    "ports": ("4000-4010", (4000, 4010)),
    "unix_sockets": ("off", False),
    "shared_memory": ("0", False),
    "spin": ("0", 0.0),
    "switch_interval": ("0", 0.0),
    "key": ("0123456789abcdef", b"0123456789abcdef"),
    "key_file": ("/keys/world", "/keys/world"),
    "trust_store": ("1", True),
    "min_workers": ("2", 2),
    "tls": ("on", True),
    "tls_ca": ("/certificates/ca.pem", "/certificates/ca.pem"),
    "tls_cert": ("/certificates/worker.pem", "/certificates/worker.pem"),
    "tls_key": ("/certificates/worker.key", "/certificates/worker.key"),
    "open_references": ("1", True),
    "audit": ("/var/log/world.jsonl", "/var/log/world.jsonl"),
    "handshake_timeout": ("2.5", 2.5),
    "max_strangers": ("10", 10),
    "max_strangers_per_address": ("3", 3),
    "max_peer_connections": ("20", 20),
    "max_peer_requests": ("500", 500),
    "max_peer_memory": ("1000000", 1_000_000),
    "max_body": ("4096", 4096),
    "max_bulk": ("8192", 8192),
    "world": ("blue", "blue"),
}


@pytest.mark.parametrize("name", variables())
def test_an_option_comes_from_code_then_environment_then_default(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, value = TEXTS[name]
    default = getattr(Options(), name)
    others = {"tls_ca", "tls_cert", "tls_key"} - {name} if name[:4] == "tls_" else ()
    for other in others:  # these come together
        monkeypatch.setenv(f"GRADWIRE_{other.upper()}", "another")
    assert default != value
    monkeypatch.setenv(f"GRADWIRE_{name.upper()}", text)
    assert getattr(Options(), name) == value
    for other in others:
        monkeypatch.delenv(f"GRADWIRE_{other.upper()}")
    assert getattr(Options(**{name: default}), name) == default


def test_one_port_is_a_range_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_PORTS", "4000")
    assert Options().ports == (4000, 4000)


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_flags_can_be_written_in_several_ways(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_UNIX_SOCKETS", text)
    assert Options().unix_sockets is True


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TIMEOUT", "soon"),
        ("THREADS", "2.5"),
        ("MAX_BODY", "1 GiB"),
        ("PORTS", "high"),
        ("SHARED_MEMORY", "maybe"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"GRADWIRE_{name}", text)
    with pytest.raises(ValueError, match=f"GRADWIRE_{name}='{text}'"):
        Options()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", -1.0),
        ("join_timeout", -0.5),
        ("heartbeat", -1),
        ("spin", -1e-6),
        ("threads", 0),
        ("max_body", 0),
        ("max_body", 1 << 32),
        ("max_bulk", -5),
        ("ports", (0, 10)),
        ("ports", (10, 9)),
        ("ports", (1, 65536)),
    ],
)
def test_an_option_that_makes_no_sense_is_named_with_its_value(
    name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=f"{name}=") as caught:
        Options(**{name: value})
    assert repr(value) in str(caught.value)


def test_a_bad_value_from_the_environment_is_refused_like_one_from_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GRADWIRE_TIMEOUT", "-3")
    with pytest.raises(ValueError, match="timeout=-3"):
        Options()


def test_options_are_not_changed_afterwards() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().timeout = 1.0  # type: ignore[misc]


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(Options(key=b"secret-secret-secret"))


# Names


@given(st.from_regex(r"[A-Za-z0-9_.:-]{1,128}", fullmatch=True))
def test_a_good_name_is_returned(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "a b", "a\n", "naïve", "x/y", "n" * 129, None, 7, b"worker0"]
)
def test_a_bad_name_is_refused_and_named(name: object) -> None:
    with pytest.raises(ValueError, match="is not valid") as caught:
        check_name(name)
    assert repr(name) in str(caught.value)
