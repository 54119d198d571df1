import pytest

from kvstrata.errors import ConfigError
from kvstrata.transports import open_transport, start_transports
from kvstrata.transports.base import Transport
from kvstrata.transports.tcp import TcpTransport


class Picky(TcpTransport):
    name = "picky"

    async def start(self):
        raise ConfigError("not on this host")


class Broken(TcpTransport):
    async def start(self):
        raise RuntimeError("a bug")


def memory():
    return memoryview(bytearray(4096))


def nobody(lease, offset, nbytes):
    return False


async def test_by_name():
    transport = open_transport("tcp", memory(), nobody)
    assert isinstance(transport, Transport)
    assert transport.name == "tcp"
    await transport.close()


@pytest.mark.parametrize(
    "name", ["", "no-such", "no_such_module:Class", "json:dumps", "kvstrata.keys:Key", "os:nothing"]
)
def test_a_name_that_is_none(name):
    with pytest.raises(ConfigError, match=r"peers\.transports"):
        open_transport(name, memory(), nobody)


async def test_what_does_not_run_here_is_skipped(caplog):
    names = [f"{__name__}:Picky", "tcp"]
    caplog.set_level("INFO")
    opened = []
    started = await start_transports(names, memory(), nobody, "127.0.0.1", opened=opened.append)
    assert [t.name for t in started] == ["tcp"]
    assert [t.name for t in opened] == ["picky", "tcp"]
    assert "not on this host" in caplog.text
    for transport in opened:
        await transport.close()


async def test_none_left():
    with pytest.raises(ConfigError, match="not on this host"):
        await start_transports([f"{__name__}:Picky"], memory(), nobody, opened=id)


@pytest.mark.parametrize(
    ("names", "told"), [([], "name some of"), (["tpc", "tcp"], "'tpc' is neither one of")]
)
async def test_a_name_misspelt_is_not_skipped(names, told):
    with pytest.raises(ConfigError, match=told):
        await start_transports(names, memory(), nobody, "127.0.0.1", opened=id)


async def test_a_bug_is_not_hidden_and_what_was_opened_is_known():
    opened = []
    names = ["tcp", f"{__name__}:Broken"]
    with pytest.raises(RuntimeError, match="a bug"):
        await start_transports(names, memory(), nobody, "127.0.0.1", opened=opened.append)
    assert [type(t) for t in opened] == [TcpTransport, Broken]
    for transport in opened:
        await transport.close()
