"""What fails for a moment is tried again, with a line; what fails for good is an error."""

import errno
import gzip
import os
import socket
import threading

import pytest

from ppl_eval.config import retries
from ppl_eval.config.retries import is_transient, open_patiently, retry
from ppl_eval.data.input_files import open_binary, stamp_of

# A file of the kernel whose every read fails with EIO: nothing is mapped at its beginning.
ALWAYS_EIO = "/proc/self/mem"
needs_it = pytest.mark.skipif(not os.path.exists(ALWAYS_EIO), reason="needs Linux' /proc")


@pytest.fixture
def pauses(monkeypatch):
    """Pauses that were made, none of which is waited for; what is in ``then`` is called in each."""
    made, then = [], []

    def sleep(seconds):
        made.append(seconds)
        for call in then:
            call(len(made))

    monkeypatch.setattr(retries.time, "sleep", sleep)
    return made, then


@pytest.fixture
def failing(tmp_path, pauses):
    """A file that cannot be read before the second pause; its content is ``words``."""
    _, then = pauses

    def make(name, content=b"words"):
        good, path = tmp_path / f"good-{name}", tmp_path / name
        good.write_bytes(content)
        path.symlink_to(ALWAYS_EIO)

        def mend(num_pauses):
            if num_pauses == 2:
                path.unlink()
                path.symlink_to(good)

        then.append(mend)
        return path

    return make


@needs_it
def test_a_read_that_fails_twice_is_tried_again_with_a_line_each(failing, pauses, capsys):
    path = failing("text.txt")
    with open_patiently(path) as file:
        assert file.read() == b"words"
    why = f"[Errno {errno.EIO}] {os.strerror(errno.EIO)}"
    assert capsys.readouterr().out.splitlines() == [
        f"{path} cannot be read: {why}; trying again in {seconds} s" for seconds in ("0.5", "1")
    ]


@needs_it
@pytest.mark.parametrize(("name", "pack"), [("text.txt", bytes), ("text.txt.gz", gzip.compress)])
def test_texts_are_read_patiently(failing, name, pack):
    with open_binary(failing(name, pack(b"words"))) as file:
        assert file.read() == b"words"


@needs_it
def test_a_read_that_fails_for_good_is_an_error(tmp_path, pauses, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(retries.time, "monotonic", lambda: now[0])
    made, then = pauses
    then.append(lambda _: now.__setitem__(0, now[0] + made[-1]))
    with (
        pytest.raises(ValueError, match=rf"cannot read {ALWAYS_EIO}: {os.strerror(errno.EIO)}"),
        open_binary(retries.Path(ALWAYS_EIO)),
    ):
        pass
    # It fails at 0 s, and a pause of 8 s more would end later than 30 s after that.
    assert made == [0.5, 1, 2, 4, 8, 8]


def test_a_missing_file_is_not_waited_for(tmp_path, pauses):
    with pytest.raises(FileNotFoundError):
        stamp_of([tmp_path / "missing"])
    assert pauses[0] == []


def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(b"first")
    file = retries._PatientFile(path)
    assert file.read(2) == b"fi"
    path.unlink()
    path.write_bytes(b"another")
    with pytest.raises(ValueError, match=r"text.txt was replaced while it was read"):
        file._open_anew()
    file.close()


def test_a_server_that_refuses_twice_and_then_accepts_is_reached(pauses, capsys):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        pauses[1].append(lambda num_pauses: server.listen() if num_pauses == 2 else None)
        with retry(lambda: socket.create_connection(("127.0.0.1", port)), "the server is away"):
            assert capsys.readouterr().out.count("the server is away: ") == 2


def test_a_hub_that_is_overloaded_twice_answers_then(pauses, capsys, monkeypatch):
    """Over HTTP, with the hub's own client and its own exceptions."""
    from http.server import BaseHTTPRequestHandler, HTTPServer

    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, hf_raise_for_status

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    answers = [503, 429, 200]

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(answers.pop(0))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    session = get_session()

    def ask():
        hf_raise_for_status(session.get(f"http://127.0.0.1:{server.server_port}/"))
        return "loaded"

    try:
        assert retry(ask, "dataset x of the hub cannot be loaded") == "loaded"
    finally:
        server.shutdown()
        server.server_close()
    assert capsys.readouterr().out.count("dataset x of the hub cannot be loaded: ") == 2


def test_the_cause_decides():
    network = OSError(errno.ETIMEDOUT, "timed out")
    wrapped = RuntimeError("cannot load")
    wrapped.__cause__ = network
    assert is_transient(network)
    assert is_transient(wrapped)
    assert not is_transient(FileNotFoundError(errno.ENOENT, "no such file"))
    assert not is_transient(ValueError("no such split"))
