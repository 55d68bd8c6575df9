"""The contract with Flower: all that Shoal uses of its internals is in one package, and is there in this version."""

import ast
import inspect
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'deploy'")

import shoal
from shoal.errors import ConfigError
from shoal.federation.flower import internals

SOURCE = Path(shoal.__file__).parent
PACKAGE = Path(internals.__file__).parent
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
"""Modules that Flower documents for apps."""

ATTRIBUTES = {
    "flwr.app:Message": ("metadata", "content", "error", "has_error", "object_id", "deflate"),
    "flwr.server.superlink.linkstate.in_memory_linkstate:InMemoryLinkState": (
        "acknowledge_node_heartbeat", "activate_node", "activate_task", "claim_task", "create_node", "create_run",
        "deactivate_node", "delete_messages", "get_message_ins", "get_node_id_by_public_key", "start_session",
        "store_message_and_object_tree", "store_object",
    ),
    "flwr.superlink.servicer.fleet.fleet_handlers": (
        "activate_node", "confirm_message_received", "deactivate_node", "get_fab", "get_run", "pull_messages",
        "pull_object", "push_messages", "push_object", "register_node", "send_node_heartbeat",
    ),
    "flwr.supernode.fleet_http_client:FleetHttpClient": (
        "ActivateNode", "ConfirmMessageReceived", "DeactivateNode", "PullMessages", "PullObject", "PushMessages",
        "PushObject", "RegisterNode", "SendNodeHeartbeat", "close", "from_server_address",
    ),
    "flwr.supercore.task_identity:TaskIdentity": ("run_id", "node_id", "task_id"),
    "flwr.supercore.inflatable.inflatable_object:InflatableObject": ("deflate", "object_id"),
    "uvicorn:Config": ("get_loop_factory", "load"),
    "uvicorn.protocols.http.h11_impl:H11Protocol": ("connection_lost", "connection_made", "data_received"),
    "uvicorn.server:ServerState": (),
}  # fmt: skip
HELD = ("lock", "nodes", "message_ins_store", "message_res_store", "message_ins_id_to_message_res_id", "object_store",
        "run_ids", "task_token_store", "_lock_object_push_sessions", "_object_push_sessions",
        "_object_push_session_by_root")  # fmt: skip
"""What a link state holds once it is made."""

PARAMETERS = {
    "flwr.server.superlink.linkstate.in_memory_linkstate:InMemoryLinkState.create_node": (
        "owner_aid", "owner_name", "public_key", "heartbeat_interval",
    ),
    "flwr.server.superlink.linkstate.in_memory_linkstate:InMemoryLinkState.get_message_ins": (
        "node_id", "limit", "run_id",
    ),
    "flwr.server.superlink.linkstate.in_memory_linkstate:InMemoryLinkState.store_message_and_object_tree": (
        "message", "object_tree", "session_id",
    ),
    "flwr.superlink.servicer.fleet.fleet_handlers:pull_messages": ("request", "state", "store"),
    "flwr.superlink.servicer.fleet.fleet_handlers:push_messages": ("request", "state"),
    "flwr.superlink.servicer.fleet.fleet_handlers:register_node": ("request", "state", "enable_supernode_auth"),
    "flwr.supernode.fleet_http_client:FleetHttpClient.from_server_address": (
        "server_address", "insecure", "root_certificates", "interceptors", "retry_invoker",
    ),
    "uvicorn.protocols.http.h11_impl:H11Protocol": ("config", "server_state", "app_state", "_loop"),
}  # fmt: skip


def imported(path):
    """The (module, name) pairs of flwr that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "flwr":
            yield from ((node.module, name.name) for name in node.names)
        elif isinstance(node, ast.Import):
            yield from ((name.name, "") for name in node.names if name.name.partition(".")[0] == "flwr")


def found(path):
    """What "module:a.b" names."""
    module, _, names = path.partition(":")
    value = import_module(module)
    for name in filter(None, names.split(".")):
        value = getattr(value, name)
    return value


def missing():
    """Everything of the contract that this version of Flower and of uvicorn lacks."""
    lacks = []
    names = [f"{module}:{name}" for path in PACKAGE.glob("*.py") for module, name in imported(path)]
    assert len(names) > 30, "the imports were not found"
    names += [f"{path}{'.' if ':' in path else ':'}{name}" for path, wanted in ATTRIBUTES.items() for name in wanted]
    for name in names:
        try:
            with suppress(RuntimeError):  # it is there, but not set
                found(name)
        except (ImportError, AttributeError):
            try:  # a submodule
                import_module(name.replace(":", "."))
            except ImportError:
                lacks.append(name)
    for path, wanted in PARAMETERS.items():
        try:
            has = [name for name in inspect.signature(found(path)).parameters if name not in ("self", "cls")]
        except (ImportError, AttributeError):
            has = []
        if tuple(has[: len(wanted)]) != wanted:
            lacks.append(f"{path}({', '.join(wanted)}), which has ({', '.join(has)})")
    return lacks


def test_this_version_has_all_that_is_used():
    lacks = missing()
    assert not lacks, f"flwr {version('flwr')} or uvicorn {version('uvicorn')} lacks:\n" + "\n".join(lacks)


def test_a_link_state_holds_what_is_read_of_it():
    from shoal.federation.flower.link_state import LinkState

    lacks = [name for name in HELD if not hasattr(LinkState(), name)]
    assert not lacks, f"flwr {version('flwr')}: InMemoryLinkState holds no {', '.join(lacks)}"


def test_what_another_version_lacks_is_named(monkeypatch):
    handlers = found("flwr.superlink.servicer.fleet.fleet_handlers")
    monkeypatch.delattr(handlers, "push_object")
    monkeypatch.delattr("flwr.supernode.fleet_http_client.FleetHttpClient.PullMessages")
    monkeypatch.setattr(handlers, "push_messages", lambda message, link: None)
    assert missing() == [
        "flwr.superlink.servicer.fleet.fleet_handlers:push_object",
        "flwr.supernode.fleet_http_client:FleetHttpClient.PullMessages",
        "flwr.superlink.servicer.fleet.fleet_handlers:push_messages(request, state), which has (message, link)",
    ]


def test_the_message_names_the_version_to_install():
    try:
        from flwr.app import Parcel  # noqa: F401
    except ImportError as error:
        raised = internals.unusable(error)
    assert isinstance(raised, ConfigError)
    assert f"flwr {version('flwr')} cannot be used: cannot import name 'Parcel'" in str(raised)
    assert f"pip install 'flwr=={internals.TESTED}.*'" in str(raised)
    assert version("flwr").startswith(f"{internals.TESTED}."), "TESTED is what pyproject.toml asks for"


def test_only_one_package_imports_flowers_internals():
    for path in SOURCE.rglob("*.py"):
        if PACKAGE not in path.parents and "flwr" in path.read_text(encoding="utf-8"):
            others = {module for module, _ in imported(path)} - PUBLIC
            assert not others, f"{path.relative_to(SOURCE)} imports {others}, not by federation.flower.internals"


@pytest.mark.slow
def test_a_link_loads_flowers_databases_only_where_they_are_used():
    """SQLAlchemy and Alembic take a second to load, and the state of `shoal serve` is in memory."""
    code = """
import sys
from shoal.federation.flower.link_state import LinkState
LinkState()
assert not {"sqlalchemy", "alembic"} & set(sys.modules)
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
made = LinkStateFactory(":memory:", NoOpFederationManager(simulation=False), ObjectStoreFactory(":memory:")).state()
assert type(made).__name__ == "SqlLinkState"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
