"""Messages of every kind with one field dropped or replaced, made from the types themselves."""

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

EXTREME_INTEGERS = (
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2**31 - 1,
    2**31,
    2**48,
    2**48 + 1,
    2**53,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
EXTREME_FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 1e308, 5e-324)

values = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(EXTREME_INTEGERS),
    st.sampled_from(EXTREME_FLOATS),
    st.text(max_size=40),
    st.sampled_from(["../../dev/shm/x", "tcp://127.0.0.1:1", "a" * 32, "A" * 32, "\0", "x" * 5000]),
    st.binary(max_size=40),
    st.lists(st.sampled_from(EXTREME_INTEGERS), max_size=4),
    st.lists(st.lists(st.none(), max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(-1, 5), max_size=3),
)


def example(kind, known):
    """A valid value of a type as `msgspec.inspect` describes it; `known` has those of fields by name."""
    match kind:
        case inspect.StructType(fields=fields, tag=tag):
            made = {} if tag is None else {"type": tag}
            return made | {f.encode_name: known.get(f.name, example(f.type, known)) for f in fields}
        case inspect.UnionType(types=types):
            return example(next(t for t in types if not isinstance(t, inspect.NoneType)), known)
        case inspect.IntType(ge=least):
            return max(1, least or 0)
        case inspect.FloatType():
            return 1.0
        case inspect.BoolType():
            return False
        case inspect.StrType(min_length=32):
            return "a" * 32
        case inspect.StrType(pattern=str(pattern)) if "|" in pattern:
            return pattern.strip("^$()").split("|")[0]
        case inspect.StrType():
            return ""
        case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
            return [example(item, known)]
        case inspect.DictType(key_type=key, value_type=value):
            return {example(key, known): example(value, known)}
        case inspect.TupleType(item_types=items):
            return [example(item, known) for item in items]
        case inspect.BytesType(min_length=least):
            return bytes(least or 0)
    raise AssertionError(f"no example of {kind}")


def kinds(union):
    """The struct types of a tagged union."""
    return list(inspect.type_info(union).types)


def places(document, path=()):
    """The path of every field, those of nested objects too."""
    for name, value in document.items():
        yield (*path, name)
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict) and all(isinstance(key, str) for key in inner):
            yield from places(inner, (*path, name))


@st.composite
def damaged(draw, union, known):
    """The frame of a message with one field dropped or replaced."""
    document = example(draw(st.sampled_from(kinds(union))), known)
    *path, name = draw(st.sampled_from(list(places(document))))
    holder = document = msgspec.msgpack.decode(
        msgspec.msgpack.encode(document), strict=False
    )  # a copy of its own
    for step in path:
        holder = holder[step][0] if isinstance(holder[step], list) else holder[step]
    if draw(st.booleans()):
        holder[name] = draw(values)
    else:
        del holder[name]
    return msgspec.msgpack.encode(document)


def intact(union, known):
    """The frames of valid messages, one of each kind."""
    return [msgspec.msgpack.encode(example(kind, known)) for kind in kinds(union)]
