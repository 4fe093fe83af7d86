"""A module in the place of Ray, which does jobs at once, in this process, and whose cluster is what a test says."""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Reference:
    """What a task returns."""

    def __init__(self) -> None:
        self.done: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.done


class StandIn:
    """Ray, as far as `bulk` uses it.

    versions: of WarpFold on each node; None: it has none.  init_fails: what connecting raises.  fails_with: the name of
    the error in place of any job's result.  calls, options: what was asked for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        self.versions: dict[str, str | None] = {"node0": version, "node1": version, "head": "another, but no cores"}
        self.resources = {"CPU": 3.0, "GPU": 0.0}
        self.connected = False
        self.init_fails: Exception | None = None
        self.fails_with: str | None = None
        self.calls: list[str] = []
        self.options: dict[str, Any] = {}
        self.exceptions = ModuleType("ray.exceptions")
        self.exceptions.RayError = type("RayError", (Exception,), {})  # type: ignore[attr-defined]
        for name in ("RayTaskError", "WorkerCrashedError", "NodeDiedError", "OutOfMemoryError", "RaySystemError"):
            setattr(self.exceptions, name, type(name, (self.exceptions.RayError,), {}))
        ray = ModuleType("ray")
        for name in ("is_initialized", "init", "shutdown", "nodes", "cluster_resources", "remote", "get", "cancel"):
            setattr(ray, name, getattr(self, name))
        strategies = ModuleType("ray.util.scheduling_strategies")
        strategies.NodeAffinitySchedulingStrategy = (  # type: ignore[attr-defined]
            lambda node, soft: SimpleNamespace(node=node)
        )
        modules = {"ray": ray, "ray.exceptions": self.exceptions, "ray.util": ModuleType("ray.util")}
        for name, module in (modules | {"ray.util.scheduling_strategies": strategies}).items():
            monkeypatch.setitem(sys.modules, name, module)

    def is_initialized(self) -> bool:
        return self.connected

    def init(self, address: str, **options: Any) -> None:
        self.calls.append(f"init {address}")
        if self.init_fails is not None:
            raise self.init_fails

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def cancel(self, reference: Reference) -> None:
        self.calls.append("cancel")

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name,
                "NodeManagerAddress": name,
                "Alive": True,
                "Resources": {} if name == "head" else {"CPU": 1},
            }
            for name in self.versions
        ]

    def remote(self, **options: Any) -> Callable[[Callable[..., Any]], Any]:
        self.options = options

        def task(function: Callable[..., Any]) -> Any:
            return SimpleNamespace(
                remote=lambda *args: self._run(function, *args),
                options=lambda scheduling_strategy: SimpleNamespace(
                    remote=lambda: self._version(scheduling_strategy.node)
                ),
            )

        return task

    def get(self, reference: Reference, timeout: float) -> Any:
        return reference.done.result()

    @staticmethod
    def never() -> None:
        """A job that is not done."""

    def _version(self, node: str) -> Reference:
        reference = Reference()
        if (version := self.versions[node]) is None:
            error = "ray::_version()\nTraceback\nModuleNotFoundError: No module named 'warpfold'\n"
            reference.done.set_exception(self.exceptions.RayTaskError(error))
        else:
            reference.done.set_result(version)
        return reference

    def _run(self, call: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any) -> Reference:
        reference = Reference()
        if function is StandIn.never:
            return reference
        if self.fails_with is not None:
            reference.done.set_exception(getattr(self.exceptions, self.fails_with)("it died"))
            return reference
        try:
            reference.done.set_result(call(function, args, kwargs))
        except Exception as cause:
            error = self.exceptions.RayTaskError("traceback of the worker")
            error.cause = cause
            reference.done.set_exception(error)
        return reference
