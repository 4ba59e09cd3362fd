"""The benchmark that counts the path of one gradient runs, and counts what it says."""

from tests.benchmarks.gradient_path import Call, counted, in_virtual_time, path_of


def test_the_path_of_one_gradient_is_counted_in_virtual_time() -> None:
    calls = in_virtual_time()
    count = path_of(calls)
    assert (count.threads, count.processes) == (1, 1)
    assert 20 < count.files < count.changes < count.calls < len(calls) / 4
    starts = [k for k, call in enumerate(calls) if call.begins]
    files = {call.file.rpartition("/")[2] for call in calls[starts[3] : starts[4]]}
    assert {"learner.py", "parameter_server.py", "topk.py"} <= files  # worker, server and codec


def test_changes_of_file_are_counted_within_a_thread() -> None:
    found = [
        Call(at, 1, thread, file, False)
        for at, (thread, file) in enumerate([(1, "a"), (1, "b"), (2, "a"), (1, "b")])
    ]
    assert counted(found) == (2, 4, 1, 2, 1)
