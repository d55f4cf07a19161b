"""Whose text is learnt from, and so whom the learnt weights may draft for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from speculative.errors import InvalidRequest

PUBLIC = "public"
ANYONE = "*"
_ONE = "tenant:"


@dataclass(frozen=True, slots=True)
class LearnOwner:
    """The one owner of weights that learn: a tenant, or the public."""

    tenant: str
    """The only tenant whose sessions are drafted for and learnt from; empty: the public."""
    teachers: frozenset[str] = frozenset()
    """Tenants whose text the public's weights learn from; `*` among them: every tenant."""

    @classmethod
    def of(cls, learn: str, learn_from: Sequence[str] = ()) -> Self:
        """The owner that the settings `learn` and `learn_from` name.

        Raises InvalidRequest for anything but `public` with teachers or `tenant:NAME` without.
        """
        if learn == PUBLIC:
            if not learn_from:
                raise InvalidRequest(
                    "learn is public, but learn_from names no tenant whose text all tenants' drafts may "
                    "show: give --learn-from A,B, or '*' for every tenant"
                )
            return cls("", frozenset(learn_from))
        name = learn.removeprefix(_ONE)
        if not learn.startswith(_ONE) or not name:
            raise InvalidRequest(f"learn is {learn!r}; give public, or tenant:NAME")
        if learn_from:
            raise InvalidRequest(f"what {learn} owns learns from that tenant alone: drop --learn-from")
        return cls(name)

    @property
    def label(self) -> str:
        """The owner as the setting `learn` writes it."""
        return _ONE + self.tenant if self.tenant else PUBLIC

    def may_keep(self, tenant: str, learn: bool) -> bool:
        """Whether text of a session of this tenant may be kept, given `learn` of that session."""
        if not learn:
            return False
        if self.tenant:
            return tenant == self.tenant
        return tenant in self.teachers or ANYONE in self.teachers
