"""What becomes of a session when the sidecar, or the engine, dies under it."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from memshare.client import SessionOptions, attach
from memshare.client.tables import BLOCK_TOKENS
from memshare.client.uplink import ManagerStream
from memshare.wire.errors import PoolExhausted, PoolLost, Recovering, VersionMismatch
from tests.client.harness import (
    LAYOUT,
    PERIOD,
    TinyEngine,
    assert_counted,
    attached,
    counts,
    run_engine,
    wait_for,
)


@pytest.fixture
def clean(sidecar):
    """The shared sidecar, whole and empty before and after the test."""
    yield sidecar
    if sidecar.manager.ended() is not None:
        sidecar.start_manager()
    wait_for(lambda: status(sidecar).state == "serving", "the manager")
    wait_for(lambda: counts(sidecar).free == counts(sidecar).total, "all rows")


def status(sidecar):
    with sidecar.admin() as admin:
        return admin.status()


def resumed(session, times=1):
    wait_for(
        lambda: session.state == "attached" and session.statistics.reattached >= times,
        "the session to resume",
    )


# ---- the manager ----------------------------------------------------------------------------


def test_a_session_outlives_its_manager_and_goes_on_sharing(clean):
    with attached(clean) as session:
        engine = TinyEngine(session)
        tables, other = engine.open(), engine.open()
        engine.step(tables, 4 * PERIOD)
        engine.step(other, 20)
        engine.share(tables)
        ours = session.session_id
        clean.kill_manager()
        wait_for(lambda: session.state == "detached-by-manager", "the session to notice")
        # It decodes, rolls back, opens and closes as before.
        for _ in range(40):
            engine.step(tables)
        engine.finish()
        session.truncate(tables, 4 * PERIOD + 10)
        engine.requests.remove(other)
        session.close_requests([other])
        late = engine.open()
        engine.step(late, 50)
        assert not session.synchronise()
        engine.assert_intact(tables)
        clean.start_manager()
        resumed(session)
        assert session.session_id == ours
        assert_counted(clean, session)
        # What was spent of the fidelity budget stays spent.
        with clean.admin() as admin:
            spent = {one.request_id: one.accumulated_error for one in admin.requests()}
        assert 0 < spent[tables.request_id] == pytest.approx(tables.errors.sum())
        before = int(tables.shared_entries.sum())
        engine.step(tables, 2 * PERIOD)
        assert engine.share(tables) > before
        assert engine.share(late) > 0
        engine.assert_intact(tables)
        engine.assert_intact(late)
        assert_counted(clean, session)
        assert session.statistics.rejected == 0


def test_a_long_request_comes_back_in_pieces(clean, monkeypatch):
    # As if its tables were far larger than a message.
    monkeypatch.setattr("memshare.client.messages.MESSAGE_BYTES", 256)
    monkeypatch.setattr("memshare.client.uplink.MAX_LEASED_ROWS", 100)
    with attached(clean) as session:
        engine = TinyEngine(session)
        tables, empty = engine.open(), engine.open()
        engine.step(tables, 5 * PERIOD + 3)
        engine.step(empty, 20)
        assert engine.share(tables)
        session.truncate(empty, 0)
        clean.kill_manager()
        wait_for(lambda: session.state == "detached-by-manager", "the session to notice")
        clean.start_manager()
        resumed(session)
        assert_counted(clean, session)
        with clean.admin() as admin:
            (one,) = [one for one in admin.requests() if one.sealed_tokens]
        assert one.sealed_tokens == tables.sealed
        assert one.accumulated_error == pytest.approx(tables.errors.sum())
        engine.step(tables, 2 * PERIOD)
        assert engine.share(tables)
        engine.assert_intact(tables)
        assert session.statistics.rejected == 0


def test_a_session_that_sealed_nothing_keeps_its_rows_over_a_restart(clean):
    with attached(clean) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        session.reserve([tables], 10, wait=True)
        tables.length = 10
        engine.rows[tables.rows[:, :, :10]] = engine.expected(0, 10)
        clean.kill_manager()
        clean.start_manager()
        resumed(session)
        with attached(clean) as rival:
            intruder = TinyEngine(rival, seed=1)
            intruder.step(intruder.open(), 500)
            engine.finish()
            engine.assert_intact(tables)
            assert_counted(clean, session, rival)


def test_a_session_that_works_all_along_survives_many_restarts(clean):
    with attached(clean) as session:
        engine = TinyEngine(session)
        stop = threading.Event()
        failures = []

        def work():
            random = np.random.default_rng(3)
            try:
                while not stop.is_set():
                    if len(engine.requests) < 3:
                        engine.step(engine.open(), int(random.integers(1, 100)))
                    tables = engine.requests[random.integers(len(engine.requests))]
                    act = random.random()
                    if act < 0.9 and tables.length < 600:
                        engine.step(tables)
                    elif act < 0.95 and tables.length:
                        engine.finish()
                        session.truncate(tables, int(random.integers(tables.length)))
                    else:
                        engine.assert_intact(tables)
                        engine.requests.remove(tables)
                        session.close_requests([tables])
                    time.sleep(0.0005)
            except BaseException as failure:
                failures.append(failure)

        worker = threading.Thread(target=work)
        worker.start()
        for round_ in range(4):
            time.sleep(0.1 * round_)
            done = session.statistics.reattached
            clean.kill_manager()
            clean.start_manager()
            if round_ != 1:  # once it dies again before the session is back
                resumed(session, done + 1)
        time.sleep(0.2)
        stop.set()
        worker.join()
        assert failures == []
        for tables in engine.requests:
            engine.assert_intact(tables)
        assert_counted(clean, session)
        assert session.statistics.applied > 0
        assert session.statistics.rejected == 0


def test_resuming_again_and_again_leaks_no_threads(clean):
    with attached(clean) as session:
        engine = TinyEngine(session)
        engine.step(engine.open(), 30)

        def resources():
            return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

        before = resources()
        for _ in range(4):
            done = session.statistics.reattached
            session._uplink._stream.cancel()
            resumed(session, done + 1)
        assert_counted(clean, session)
        wait_for(lambda: resources()[0] <= before[0] + 1, "threads")
        wait_for(lambda: resources()[1] <= before[1] + 2, "descriptors")


def test_a_manager_that_dies_while_a_session_resumes_is_waited_for(clean, monkeypatch):
    real, times, serving = ManagerStream.restore, [], threading.Event()

    def restore(stream, parts):
        serving.wait(10)
        times.append(1)
        if len(times) == 1:
            clean.kill_manager()
        real(stream, parts)

    monkeypatch.setattr(ManagerStream, "restore", restore)
    with attached(clean) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 3 * PERIOD)
        engine.share(tables)
        clean.kill_manager()
        clean.start_manager()
        serving.set()
        wait_for(lambda: times, "the session to come back")
        for _ in range(30):
            engine.step(tables)
        clean.start_manager()
        wait_for(lambda: session.state == "attached" and len(times) > 1, "the session")
        resumed(session)
        engine.share(tables)
        engine.assert_intact(tables)
        assert_counted(clean, session)
        names = [thread.name for thread in threading.enumerate()]
        assert "memshare-resume" not in names


def test_nothing_is_granted_until_all_engines_are_back(clean):
    stopped = run_engine(clean, "print('ready', flush=True)\nsys.stdin.read()\n")
    assert stopped.stdout.readline() == "ready\n"
    with attached(clean, timeout=1.0) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 20)
        stopped.send_signal(signal.SIGSTOP)
        clean.kill_manager()
        clean.start_manager()
        resumed(session)
        assert status(clean).state == "recovering"
        assert list(status(clean).awaited_pids) == [stopped.pid]
        # A decode step does not wait for that, and takes no row that may be another's.
        for _ in range(100):
            engine.step(tables)
        engine.assert_intact(tables)
        assert session.statistics.overflow_tokens > 0
        with pytest.raises(Recovering, match=str(stopped.pid)):
            attach(LAYOUT.__class__(1, 1, 8, 8, LAYOUT.dtype), options(clean))
        stopped.send_signal(signal.SIGCONT)
        wait_for(lambda: status(clean).state == "serving", "the engine to come back")
        for _ in range(20):
            engine.synchronise()
        assert tables.overflow_from is None
        engine.assert_intact(tables)
        counts(clean)
    stopped.communicate()
    assert stopped.returncode == 0
    wait_for(lambda: counts(clean).free == counts(clean).total, "its rows")


def options(sidecar):
    return SessionOptions(runtime_dir=sidecar.runtime.path)


def test_an_engine_that_detaches_while_the_manager_is_gone_is_not_waited_for(clean):
    with attached(clean) as session:
        engine = TinyEngine(session)
        engine.step(engine.open(), 40)
        engine.finish()
        clean.kill_manager()
        wait_for(lambda: session.state == "detached-by-manager", "the session to notice")
    clean.start_manager()
    assert status(clean).state == "serving"
    assert session.state == "closed"


def test_a_manager_that_is_stopped_does_not_wait_for_engines_and_gets_them_back(clean, caplog):
    with attached(clean) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 3 * PERIOD)
        engine.share(tables)
        started = time.monotonic()
        assert clean.manager.stop(10)
        assert time.monotonic() - started < 3
        engine.step(tables, 1)
        clean.start_manager()
        resumed(session)
        engine.share(tables)
        engine.assert_intact(tables)
        assert_counted(clean, session)
    gone = [r for r in caplog.records if "the sidecar is gone" in r.message]
    assert len(gone) == 1


def test_a_session_that_may_not_resume_is_lost_and_keeps_its_rows(clean, monkeypatch):
    with attached(clean) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 40)
        engine.synchronise()
        clean.kill_manager()
        monkeypatch.setattr("memshare.client.messages.MIN_PROTOCOL", 7)
        monkeypatch.setattr("memshare.client.messages.MAX_PROTOCOL", 7)
        clean.start_manager()
        wait_for(lambda: session.state == "lost", "the refusal")
        monkeypatch.undo()
        assert isinstance(session.lost_reason, VersionMismatch)
        with pytest.raises(PoolLost, match="speaks memshare protocol 7"):
            session.open_request()
        time.sleep(0.3)
        # While it still reads its rows, they are nobody else's.
        assert status(clean).state == "recovering"
        with pytest.raises(Recovering):
            attach(LAYOUT, options(clean))
        for _ in range(100):
            engine.step(tables)
        engine.assert_intact(tables)
    wait_for(lambda: status(clean).state == "serving", "the end of the session")
    with attached(clean) as session:
        engine = TinyEngine(session)
        engine.step(engine.open(), 40)


# ---- the worker -----------------------------------------------------------------------------


def test_a_session_outlives_the_worker_and_goes_on_sharing(clean):
    with attached(clean) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 4 * PERIOD)
        engine.finish()  # the worker gets to work
        before = status(clean)
        os.kill(before.worker_pid, signal.SIGKILL)
        for _ in range(2 * PERIOD):
            engine.step(tables)
        assert session.synchronise()
        assert session.state == "attached"
        wait_for(
            lambda: (
                status(clean).agent_state == "ready"
                and status(clean).worker_epoch != before.worker_epoch
            ),
            "the worker to come back",
            timeout=60,
        )
        wait_for(lambda: engine.share(tables) > 4 * PERIOD, "sharing to go on")
        engine.assert_intact(tables)
        assert_counted(clean, session)
        assert session.statistics.rejected == session.statistics.reattached == 0


# ---- the engine -----------------------------------------------------------------------------


def test_an_engine_that_is_stopped_is_not_reaped(clean):
    more = """
print('ready', flush=True)
sys.stdin.readline()
engine.step(tables, 64)
engine.share(tables)
engine.assert_intact(tables)
print(session.state, session.statistics.reattached, flush=True)
"""
    stopped = run_engine(clean, more)
    assert stopped.stdout.readline() == "ready\n"
    before = counts(clean)
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(1)
    after = counts(clean)
    assert (after.live, after.leased) == (before.live, before.leased)
    assert status(clean).sessions == 1
    stopped.send_signal(signal.SIGCONT)
    assert stopped.communicate("go\n", timeout=20)[0] == "attached 0\n"
    wait_for(lambda: counts(clean).free == counts(clean).total, "its rows")


@pytest.mark.slow
def test_many_killed_engines_leave_nothing(clean):
    def descriptors():
        return len(os.listdir(f"/proc/{clean.manager.pid}/fd")), len(
            os.listdir(f"/proc/{clean.agent.pid}/fd")
        )

    for number in range(12):
        engine = run_engine(clean, "print('ready', flush=True)\nsys.stdin.read()\n")
        assert engine.stdout.readline() == "ready\n"
        engine.kill()
        engine.communicate()
        wait_for(lambda: counts(clean).free == counts(clean).total, "its rows")
        if number == 2:
            before = descriptors()
    wait_for(lambda: descriptors() <= (before[0] + 1, before[1] + 1), "descriptors")


# ---- the owner ------------------------------------------------------------------------------


def assert_goes_on_alone(session, engine, tables):
    """A lost session decodes what it has begun, and begins nothing."""
    assert isinstance(session.lost_reason, PoolLost)
    with pytest.raises(PoolLost, match=r"is lost.*attach a new session"):
        session.open_request()
    for _ in range(300):
        engine.step(tables)
    engine.finish()
    session.truncate(tables, 150)
    engine.step(tables, 200)  # even a prompt does not wait for a sidecar that is gone
    engine.assert_intact(tables)
    assert not session.synchronise()
    session.close_requests([tables])


def test_a_session_outlives_the_owner_of_its_memory(fresh_sidecar, caplog):
    with attached(fresh_sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 4 * PERIOD)
        engine.share(tables)
        fresh_sidecar.kill_agent()
        wait_for(lambda: session.state == "lost", "the session to notice", timeout=5)
        assert_goes_on_alone(session, engine, tables)
        said = [record for record in caplog.records if record.name == "memshare.client"]
        assert len([r for r in said if "is gone" in r.message]) == 1
        # A new owner has other memory: the lost session does not mistake it for its own.
        fresh_sidecar.start_agent()
        wait_for(lambda: status(fresh_sidecar).agent_state == "ready", "the new agent")
        assert session.state == "lost"
        with attached(fresh_sidecar) as second:
            ours = TinyEngine(second)
            fresh = ours.open()
            ours.step(fresh, 4 * PERIOD)
            assert ours.share(fresh) > 0
            assert_counted(fresh_sidecar, second)


def test_a_session_outlives_manager_and_owner_at_once(fresh_sidecar):
    with attached(fresh_sidecar) as session:
        engine = TinyEngine(session)
        tables = engine.open()
        engine.step(tables, 4 * PERIOD)
        engine.share(tables)
        fresh_sidecar.kill_manager()
        fresh_sidecar.kill_agent()
        wait_for(lambda: session.state == "lost", "the session to notice", timeout=5)
        assert_goes_on_alone(session, engine, tables)


def test_a_prompt_that_waits_for_rows_is_told_when_the_manager_goes(clean):
    bound = 2 * BLOCK_TOKENS * 4
    with attached(clean, max_rows=bound, timeout=20.0) as session:
        tables = session.open_request()
        killer = threading.Timer(0.2, clean.kill_manager)
        killer.start()
        started = time.monotonic()
        try:
            while True:
                session.reserve([tables], 4 * BLOCK_TOKENS, wait=True)
                break
        except PoolExhausted:
            pass
        killer.join()
        assert time.monotonic() - started < 5


def test_a_killed_engine_frees_all_although_its_forked_child_lives_on(clean):
    more = """
import time
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""
    engine = run_engine(clean, more)
    child = int(engine.stdout.readline())
    try:
        engine.kill()
        engine.wait()
        wait_for(lambda: counts(clean).free == counts(clean).total, "its rows", timeout=5)
    finally:
        os.kill(child, signal.SIGKILL)
        engine.communicate()
