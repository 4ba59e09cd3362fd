"""Construct objects from specs (`_target_` and keys), and explain errors in one sentence."""

import difflib
import importlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from types import FunctionType
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ashl.config.faults import MEMORY_FIX, error_text, is_out_of_memory
from ashl.errors import AshlError, DeadlockError, OwnFaultError, UsageError
from ashl.option import Contract, refuse_wrong_hooks, refuse_wrong_types

REQUIRED_ATTRIBUTES = {  # attributes that a class of a group must have
    "model": ("build",),
    "dataset": ("load", "batch_size"),
    "cluster": ("num_workers",),
    "runtime": ("name", "gradients"),
    "tracking": ("sink", "events"),
}
BASE_CLASSES = {  # base class that a class of a group must extend
    "task": "ashl.task.contract.Task",
    "optimizer": "ashl.optimizer.contract.Optimizer, or torch.optim.Optimizer",
    "topology": "ashl.stage.contract.Topology",
    "sync": "the rule class of its topology, for example ashl.topology.parameter_server.ServerRule",
    "aggregate": "ashl.aggregate.weighted.Weighted",
    "compression": "ashl.compression.contract.Codec",
    "outer": "ashl.outer.contract.Outer",
    "overlap": "ashl.overlap.contract.Overlap",
    "planner": "ashl.planner.assignment.Planner",
    "schedule": "ashl.schedule.choices.Schedule",
}
PHRASES = (  # wording of pydantic, and the wording of ashl's messages
    (r"^Value error, ", ""),
    (
        r"^\w+ should have at (least|most) (\d+) items? after validation, not",
        r"should have at \1 \2 values, not",
    ),
    (r"^(Input|String|List|Tuple) should", "should"),
    (r"should have at least 1 character", "should not be empty"),
    (r"should be a valid (tuple|list|array)", "should be a list"),
    (
        r"should be a valid string",
        "should be text; write a number as text like \"'3'\"",
    ),
    (r"should be a valid integer", "should be a whole number"),
    (r"should be a valid number", "should be a number"),
    (r"should be a valid boolean", "should be true or false"),
    (
        r"should be (a (valid )?dictionary|an object).*",
        "should be keys and values, for example {key: value}",
    ),
    (r", (unable to|got a number with).*", ""),
)
# prefixes of pydantic's names for alternatives, in the path of an error
BRANCHES = ("function-", "constrained-", "literal[", "tuple[", "list[")
# exceptions that code of ashl raises if a part of the user's own has returned a wrong value
OF_WRONG_VALUES = (TypeError, ValueError, AttributeError, ArithmeticError, LookupError)
SESSION = "python_session"  # module of objects passed from Python, see `ashl.config.session`
Maker = type[Any] | FunctionType  # a class or function that a `_target_` names
Plain = Callable[[Maker, Mapping[str, Any]], Any]


def construct(
    spec: Mapping[str, Any], where: str, allow: Sequence[str] = (), make_plain: Plain | None = None
) -> Any:
    """Return the object that `_target_` names, made with the spec's other keys.

    Only objects of `ashl`, or of a package in `allow`, may be named, so that a configuration cannot
    run arbitrary code. They are classes and, outside of `ashl`, functions that `make_plain`
    accepts. `make_plain` receives the named object and its keys, and returns None for a class that
    is an option.
    Raises: UsageError, also for a fault in a class of the user's own.
    """
    target = spec.get("_target_")
    if not isinstance(target, str) or "." not in target:
        lacks = f"a `_target_` that names no class ({target})" if target else "no `_target_`"
        raise UsageError(
            f"{where} has {lacks}; take one of the options that `ashl list {where}` shows, or write"
            " `_target_: MODULE.CLASS`"
        )
    cls = import_target(target, where, allow)
    keys = {key: value for key, value in spec.items() if key != "_target_"}
    try:
        if make_plain and not target.startswith("ashl."):
            made = make_plain(cls, keys)
            if made is not None:
                return made
    except ValidationError as error:
        raise UsageError(explain_error(error, where, cls)) from error
    check_class(cls, target, where)
    try:
        made = cls(**keys)
        if isinstance(made, Contract):
            refuse_wrong_types(made, where)
    except ValidationError as error:
        raise UsageError(explain_error(error, where, cls)) from error
    except AshlError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{where} names {target!r}, which cannot be made: {describe_error(error, allow)}"
        ) from error
    return made


def check_class(cls: Maker, target: str, where: str) -> None:
    """Refuse an object that is not a class of the group `where`.

    Raises: UsageError.
    """
    if not isinstance(cls, type):
        raise UsageError(f"{where} names {target!r}, which is not a class")
    if where in BASE_CLASSES:
        if not (issubclass(cls, Contract) and cls._group == where):
            raise UsageError(
                f"{where} names {target!r}, which is no {where}: it has to extend"
                f" {BASE_CLASSES[where]}; take one of the options that `ashl list {where}` shows,"
                " or give the class that base"
            )
        refuse_wrong_hooks(cls, where)
    lacking = [name for name in REQUIRED_ATTRIBUTES.get(where, ()) if not has_attribute(cls, name)]
    if lacking:
        raise UsageError(
            f"{where} names {target!r}, which is no {where}: it has no {lacking[0]!r}; take one of"
            f" the options that `ashl list {where}` shows, or give the class that attribute"
        )


def bind_arguments(
    make: Maker, keys: Mapping[str, Any], where: str, offered: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a class or function of the user's own.

    They are its keys, and the values of `offered` that it has a parameter for.
    Raises: UsageError if they do not fit the signature.
    """
    known = signature(make).parameters
    passed = {name: value for name, value in offered.items() if name in known} | dict(keys)
    try:
        signature(make).bind(**passed)
    except TypeError as error:
        takes = ", ".join(name for name in known if name not in offered) or "none"
        raise UsageError(f"{where}: {make.__name__}() {error}; its keys are: {takes}") from error
    return passed


def import_target(target: str, where: str, allow: Sequence[str]) -> Maker:
    """Return the class or function of a dotted name. Raises: UsageError."""
    module_name, _, class_name = target.rpartition(".")
    package = module_name.split(".")[0]
    if package not in ("ashl", *allow):
        raise UsageError(
            f"{where} names {target!r}, outside of ashl; allow it with 'allow_targets=[{package}]'"
        )
    if package == SESSION and SESSION not in sys.modules:
        raise UsageError(
            f"{where} names {target!r}, an object of the Python session that began the run; move it"
            " into a file and import it from there"
        )
    if package != "ashl" and "" not in sys.path:
        sys.path.append("")  # the working directory, last: it never hides installed modules
    try:
        cls = getattr(importlib.import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}.") and package != "ashl":
            reason = (
                f"there is no module {error.name!r}; start in the folder that holds it, or"
                " install it"
            )
        else:
            reason = describe_error(error, allow)
        raise UsageError(f"{where} names {target!r}, which cannot be imported: {reason}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{where} names {target!r}, which cannot be imported: {describe_error(error, allow)}"
        ) from error
    own = package != "ashl"
    if isinstance(cls, type | FunctionType if own else type):
        home = cls.__module__.split(".")[0] if own else cls.__module__
        if package == SESSION or home == (package if own else module_name):
            return cls
    raise UsageError(f"{where} names {target!r}, which is not a class defined in {module_name}")


@contextmanager
def report_own_faults(allow: Sequence[str], kind: type[AshlError] = UsageError) -> Generator[None]:
    """Report exceptions of the user's own classes as faults of these, with file and line."""
    try:
        yield
    except OwnFaultError as error:
        raise kind(str(error)) from error.__cause__
    except DeadlockError as error:
        if not allow:
            raise
        raise AshlError(
            f"{error}; a part of your own ({', '.join(allow)}) may be the cause, for example a"
            " may_proceed that names no worker"
        ) from error
    except AshlError:
        raise
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise kind(f"{MEMORY_FIX} ({error_text(error)})") from error
        if isinstance(error, NotImplementedError) and (lacks := missing_hook_message(error, allow)):
            raise kind(f"an option of your own failed, not ashl: {lacks}") from error
        if not place_of(error, allow):
            if not allow or not isinstance(error, OF_WRONG_VALUES):
                raise
            raise AshlError(
                f"{error_text(error)}; a part of your own ({', '.join(allow)}) may have returned a"
                " wrong value, or ashl is at fault, --debug shows where"
            ) from error
        raise kind(
            f"{option_of(error, allow)} failed, not ashl: {describe_error(error, allow)}"
        ) from error


def has_attribute(cls: type, name: str) -> bool:
    """Return True if objects of the class have this attribute, also as a field."""
    return hasattr(cls, name) or name in getattr(cls, "__dataclass_fields__", ())


def describe_error(error: BaseException, allow: Sequence[str]) -> str:
    """Return the exception's class and message, with file and line if it is from an allowed
    package.
    """
    place = place_of(error, allow)
    text = error_text(error)
    if isinstance(error, SyntaxError):  # its text has the file and the line, too
        text = f"{type(error).__name__}: {error.msg}"
    return text + (f" ({place})" if place else "")


def missing_hook_message(error: NotImplementedError, allow: Sequence[str]) -> str:
    """Return the message about a hook without default that a class of the user's own lacks; "" for
    other classes.
    """
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    cls = type(frame.f_locals.get("self"))
    if cls.__module__.split(".")[0] not in allow:
        return ""
    hook = frame.f_code.co_name
    return (
        f"'{cls.__module__}.{cls.__name__}' does not define {hook!r}, which has no default; define"
        " it"
    )


def option_of(error: BaseException, allow: Sequence[str]) -> str:
    """Return the option of the user's own whose code raised an exception."""
    own = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        cls = type(frame.f_locals.get("self"))
        if cls.__module__.split(".")[0] in allow:
            own = f"{getattr(cls, '_group', '')} {cls.__module__}.{cls.__qualname__}".strip()
    return own or "an option of your own"


def place_of(error: BaseException, allow: Sequence[str]) -> str:
    """Return file and line of the user's own code that raised an exception; "" if none did."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    # the module of the object that lacks an attribute, for an AttributeError
    owner = sys.modules.get(type(getattr(error, "obj", None)).__module__)
    file = getattr(owner, "__file__", None)  # which builtins lacks
    if file and owner is not None and owner.__name__.split(".")[0] in allow:
        return str(file)
    steps = traceback.walk_tb(error.__traceback__)
    own = [
        (f.f_code.co_filename, n)
        for f, n in steps
        if f.f_globals.get("__name__", "").split(".")[0] in allow
    ]
    return f"{own[-1][0]}, line {own[-1][1]}" if own else ""


def explain_error(error: ValidationError, where: str, cls: Maker) -> str:
    """Return one sentence about the first error.

    A key of several kinds has an error for each; those about the innermost part of the value count.
    """
    errors = [(keys_of(each), each) for each in error.errors()]
    of_key = [(path, each) for path, each in errors if path[:1] == errors[0][0][:1]]
    path, first = max(of_key, key=lambda found: len(found[0]))
    key = ".".join([*([where] if where else []), *path])
    known = [name for name in getattr(cls, "__dataclass_fields__", {}) if name[0] != "_"]
    if first["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        if len(path) > 1:
            return f"{key} is not a key; remove it"
        near = difflib.get_close_matches(path[-1], known, n=1)
        there = f"there are: {', '.join(known)}" if known else f"{cls.__name__} takes none"
        return f"{key} is not a key; " + (f"did you mean {near[0]!r}?" if near else there)
    if first["type"] in ("missing_argument", "missing_keyword_only_argument", "missing"):
        return f"{key} is missing; give it a value"
    if not path:
        raised = first.get("ctx", {}).get("error")
        return (
            f"{where} names {cls.__module__}.{cls.__name__}, which cannot be made:"
            f" {raised or first['msg']}"
        )
    messages = dict.fromkeys(rephrase(each["msg"]) for keys, each in of_key if keys == path)
    message = ", or ".join(messages).replace(", or should be ", ", or ")
    if isinstance(first["input"], dict) and first["type"] == "value_error":
        return f"{key}: {message}"
    if message == "should be a list" and isinstance(first["input"], str | int | float):
        message += f", for example '{key}=[{as_typed(first['input'])}]'"
    return f"{key}={as_typed(first['input'])} is not possible: {message}"


def keys_of(error: ErrorDetails) -> list[str]:
    """Return the keys of the value that an error is about, without pydantic's own names."""
    path = [str(part) for part in error["loc"] if not str(part).startswith(BRANCHES)]
    return [part for part in path if part != "[key]"]


def rephrase(message: str) -> str:
    """Return a message of pydantic in the wording of ashl."""
    for said, meant in PHRASES:
        message = re.sub(said, meant, message)
    return message


def as_typed(value: Any) -> str:
    """Return a value as a user types it on the command line."""
    if isinstance(value, float) or (isinstance(value, str) and value.isprintable()):
        return str(value) or "''"
    return json.dumps(value, default=str)
