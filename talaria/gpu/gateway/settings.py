"""What of the cluster file can change while the gateway runs: keys, aliases, limits. A reload replaces it whole."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from talaria.errors import InputError
from talaria.gpu.config import ClusterConfig, Key, Limits
from talaria.gpu.dialects import Problem

DEFAULT_TENANT: Final = "default"


@dataclass(frozen=True)
class Tenant:
    """Who sent a request, and what it may hold at most."""

    name: str
    max_in_flight: int | None
    max_leases: int | None


_EVERYBODY: Final = Tenant(DEFAULT_TENANT, None, None)


class Settings:
    """Raises InputError where a key's environment variable is not set, or a key stands for two."""

    def __init__(self, config: ClusterConfig) -> None:
        gateway = config.gateway
        self.limits: Limits = gateway.limits
        self.default_model = gateway.default_model
        self.models = tuple(config.models)
        self.aliases = {name: model for name, model in gateway.aliases.items() if not name.endswith("*")}
        stems = [(name[:-1], model) for name, model in gateway.aliases.items() if name.endswith("*")]
        self._stems = sorted(stems, key=lambda item: -len(item[0]))
        self._keys = [(_digest(key.key.read(f"gateway.keys: {key.name}")), _tenant(key)) for key in gateway.keys]
        admin = gateway.admin_key
        self._admin = None if admin is None else _digest(admin.read("gateway.admin_key"))
        keys = [digest for digest, _ in self._keys] + ([] if self._admin is None else [self._admin])
        if len(set(keys)) < len(keys):
            raise InputError("two keys are the same", where="gateway", allowed="a key of its own for each name and for the administrator")

    @property
    def has_admin(self) -> bool:
        return self._admin is not None

    @property
    def has_keys(self) -> bool:
        return bool(self._keys)

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """Whose key the request shows (``Authorization: Bearer`` or ``x-api-key``). Raises Problem for none or a wrong one."""
        if not self._keys:
            return _EVERYBODY
        shown = _shown(headers)
        found = None
        digest = _digest(shown)
        for known, tenant in self._keys:  # all of them, so that the time tells nothing
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Problem(401, "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", kind="invalid_api_key")
        return found

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Raises Problem unless the request shows the admin key."""
        if self._admin is None:
            raise Problem(404, "there are no admin endpoints: gateway.admin_key is not set")
        if not hmac.compare_digest(self._admin, _digest(_shown(headers))):
            raise Problem(401, "the admin key is needed: Authorization: Bearer KEY", kind="invalid_api_key")

    def served_name(self, asked: object) -> str:
        """The model that a request for ``asked`` gets. Raises Problem where there is none."""
        if asked is not None and not isinstance(asked, str):
            raise Problem(400, "model must be a string")
        if asked in self.models:
            return asked
        if asked:
            exact = self.aliases.get(asked)
            if exact is not None:
                return exact
            for stem, model in self._stems:
                if asked.startswith(stem):
                    return model
        if self.default_model is not None:
            return self.default_model
        if not asked:
            raise Problem(400, "model is missing")
        raise Problem(404, f"model {asked[:100]!r} is not served here; there are: {', '.join(self.models)}", kind="model_not_found")


def _tenant(key: Key) -> Tenant:
    return Tenant(key.name, key.max_in_flight, key.max_leases)


def _shown(headers: Mapping[str, str]) -> str:
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value:
        return value.strip()
    return headers.get("x-api-key", "").strip()


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()
