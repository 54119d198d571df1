import pytest
from server_kit import join, running

from kvstrata.config import ServerSettings
from kvstrata.control import ControlPlane
from kvstrata.errors import ConfigError, PeerRefused
from kvstrata_server.access import tokens
from kvstrata_server.access.roles import Role
from kvstrata_server.app import create_app, main
from kvstrata_server.sql.database import Database


async def test_a_token_opens_every_route(tmp_path):
    async with running(tmp_path, token="s3cret") as r:
        await join(r.control, "a")
        assert [n.id for n in (await r.control.nodes()).nodes] == ["a"]


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "Basic s3cret", "s3cret", "Bearer s3cret2"]
)
async def test_without_it_nothing_but_health_is_answered(tmp_path, header):
    async with running(tmp_path, token="s3cret") as r:
        headers = {} if header is None else {"Authorization": header}
        for path in ("/v1/nodes", "/v1/transfers", "/metrics", "/openapi.json", "/no/such/path"):
            response = await r.http.get(path, headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["code"] == "unauthenticated"
        for path in ("/healthz", "/readyz"):
            assert (await r.http.get(path, headers=headers)).status_code == 200


async def test_the_client_says_what_to_set(tmp_path):
    async with running(tmp_path, token="s3cret") as r:
        transport = r.http._transport
        async with ControlPlane("http://test", "wrong", transport=transport) as stranger:
            with pytest.raises(PeerRefused, match="KVSTRATA_NODE_CONTROL__TOKEN"):
                await stranger.nodes()


@pytest.mark.parametrize("listen", ["0.0.0.0:7800", "10.1.2.3:7800", "[::]:7800", "node7:7800"])
async def test_others_may_not_reach_a_server_without_a_token(tmp_path, listen):
    url = f"sqlite+aiosqlite:///{tmp_path}/x.sqlite"

    async def opens(token: str = "") -> bool:
        app = create_app(ServerSettings(listen=listen, database=url, token=token))
        async with app.router.lifespan_context(app):
            return True

    with pytest.raises(ConfigError, match="KVSTRATA_SERVER_TOKEN"):
        await opens()
    assert await opens("t")
    database = Database(url)
    await tokens.create(database, "ci", Role.READ, now=0.0)
    await database.close()
    assert await opens()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "0.0.0.0:0"], "KVSTRATA_SERVER_TOKEN"),
        (["--listen", "nonsense"], "host:port"),
        (["--heartbeat-ttl", "soon"], "is not a time"),
        (["--database", "sqlite:///x.sqlite"], "sqlite+aiosqlite"),
        (["--database", "mysql+aiomysql://h/x"], "server.database"),
        (["--listen", "127.0.0.1:0", "--database", "sqlite+aiosqlite:////no/x"], "directory"),
        (["--tls-cert", "cert.pem"], "both, or neither"),
        (["--tls-cert", "cert.pem", "--tls-key", "key.pem"], "belong together"),
    ],
)
def test_settings_that_cannot_work_say_what_to_change(
    arguments, said, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where the default database would be
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
