"""Policies by name."""

from __future__ import annotations

import importlib
import inspect

from scheduler_svc.policies.base import BaseScheduler
from scheduler_svc.policies.guard import words_of

BUILT_IN = {
    "fcfs": "scheduler_svc.policies.fcfs:FcfsScheduler",
    "priority": "scheduler_svc.policies.priority:PriorityScheduler",
    "shortest-first": "scheduler_svc.policies.shortest_first:ShortestFirstScheduler",
}
"""Short names of the policies that come with the scheduler."""


class PolicyError(ValueError):
    """A policy that cannot be used; the message says why and what to do."""


def load_policy(name: str) -> BaseScheduler:
    """Make the policy of a short name or `package.module:Class`, a subclass of BaseScheduler made without arguments.

    Raises PolicyError.
    """
    module_name, separator, class_name = BUILT_IN.get(name, name).partition(":")
    if not (module_name and separator and class_name):
        known = ", ".join(sorted(BUILT_IN))
        raise PolicyError(f"policy {name!r} is neither one of {known} nor of the form package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that ends itself, for one
        raise PolicyError(f"policy {name!r}: module {module_name!r} cannot be imported: {words_of(error)}") from error
    policy_class = getattr(module, class_name, None)
    if policy_class is None:
        raise PolicyError(f"policy {name!r}: module {module_name!r} has no {class_name!r}")
    if not (isinstance(policy_class, type) and issubclass(policy_class, BaseScheduler)):
        raise PolicyError(f"policy {name!r}: {class_name!r} is no scheduler_svc.policies.base.BaseScheduler")
    if inspect.isabstract(policy_class):
        missing = ", ".join(sorted(policy_class.__abstractmethods__))
        raise PolicyError(f"policy {name!r}: {class_name!r} lacks {missing}")
    try:
        policy = policy_class()
        preempted_first = policy.preempted_first
    except (Exception, SystemExit) as error:
        raise PolicyError(f"policy {name!r}: {class_name}() failed: {words_of(error)}") from error
    if not isinstance(preempted_first, bool):
        raise PolicyError(f"policy {name!r}: preempted_first of {class_name!r} is neither True nor False")
    return policy
