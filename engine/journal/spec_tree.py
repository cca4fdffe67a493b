"""Trees of JournalSpecs in YAML, as `journals apply`, `edit` and `list` use them (spec/journals.md §2).

A directory node (its name is empty or ends in `/`) holds values that its children inherit; a terminal node is
one journal. `parse_tree` reads strict YAML, `flatten` pushes values down and gives the changes of an Apply,
`hoist` builds a tree of journals with the values they share pulled up, `format_tree` writes it.

PyYAML is imported on first use: most programs that load specs never see YAML.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from typing import TYPE_CHECKING, Any, TypeVar

from broadsheet.engine.errors import ValidationError
from broadsheet.engine.journal.durations import format_duration, parse_duration
from broadsheet.engine.journal.spec import (
    CompressionCodec,
    FragmentSpec,
    JournalChange,
    JournalFlags,
    JournalSpec,
    Suspend,
    SuspendLevel,
)
from broadsheet.engine.labels.label_set import EMPTY_LABEL_SET, Label, LabelSet, intersect, subtract, union
from broadsheet.engine.labels.tokens import go_quote, validate_request_journal

if TYPE_CHECKING:
    import yaml

__all__ = ["SpecNode", "flatten", "format_tree", "hoist", "hoist_tree", "parse_tree", "push_down"]

_EMPTY_SPEC = JournalSpec()


@dataclass(frozen=True, slots=True)
class SpecNode:
    """One node of a tree. `spec` is partial in a tree as parsed, and holds the node's name.

    `delete` is None where not given (inherit). `revision` is for terminal nodes: 0 to create, -1 for any.
    `no_stores` tells an explicit empty list of stores, which overrides the parent's, from an absent one.
    """

    spec: JournalSpec = _EMPTY_SPEC
    comment: str = ""
    delete: bool | None = None
    revision: int = 0
    children: tuple[SpecNode, ...] = ()
    no_stores: bool = False

    @property
    def name(self) -> str:
        """Name of the journal, or prefix of the names of the children."""
        return self.spec.name

    @property
    def is_directory(self) -> bool:
        """Whether this node stands for the journals below it, and not for a journal."""
        return not self.name or self.name.endswith("/")

    def validate(self) -> None:
        """Raise `ValidationError` for the first broken rule of the tree's shape (spec/journals.md §2).

        Specs are left to `JournalSpec.validate`: before the push-down they are partial.
        """
        if not self.is_directory:
            try:
                validate_request_journal(self.name)
            except ValidationError as err:
                raise err.within("Name") from None
            if self.children:
                raise ValidationError(f"expected no Children with non-directory Node ({self.name})")
            return
        if self.revision:
            raise ValidationError(f"unexpected Revision ({self.revision})")
        if not self.children:
            raise ValidationError("expected one or more Children")
        previous = None
        for index, child in enumerate(self.children):
            try:
                child.validate()
            except ValidationError as err:
                raise err.within(f"Children[{index}]") from None
            if not child.name.startswith(self.name):
                raise ValidationError(f"expected parent Name to prefix child ({self.name} vs {child.name})")
            if previous is not None and child.name <= previous:
                raise ValidationError(
                    f"expected Children to be ordered (ind {index}; {previous} vs {child.name})"
                )
            previous = child.name

    def terminals(self) -> Iterator[SpecNode]:
        """The terminal nodes of this tree, in order."""
        if not self.is_directory:
            yield self
        for child in self.children:
            yield from child.terminals()


# Pushing values down, and pulling them up.

_T = TypeVar("_T")


def flatten(tree: SpecNode) -> list[JournalChange]:
    """One change for each terminal node of a tree, with inherited values: upserts, and deletions.

    Raises `ValidationError` if the tree is misshapen. The changes themselves are not validated.
    """
    tree.validate()
    return [
        JournalChange(node.revision, None, node.name)
        if node.delete
        else JournalChange(node.revision, node.spec)
        for node in push_down(tree).terminals()
    ]


def push_down(tree: SpecNode) -> SpecNode:
    """The tree with each node's values completed from its parent's, top down.

    A value that is not zero is kept; labels are inherited by name; a list of stores is, unless the node gives
    one, even an empty one. `suspend`, `revision` and `comment` are not inherited.
    """
    children = tuple([push_down(_inherit(child, tree)) for child in tree.children])
    return replace(tree, children=children) if children else tree


def _inherit(child: SpecNode, parent: SpecNode) -> SpecNode:
    own, theirs = child.spec, parent.spec
    fragment, above = own.fragment, theirs.fragment
    has_own_stores = child.no_stores or bool(fragment.stores)
    spec = replace(
        own,
        replication=own.replication or theirs.replication,
        labels=union(own.labels, theirs.labels),
        fragment=FragmentSpec(
            length=fragment.length or above.length,
            compression_codec=fragment.compression_codec or above.compression_codec,
            stores=fragment.stores if has_own_stores else above.stores,
            refresh_interval_ns=fragment.refresh_interval_ns or above.refresh_interval_ns,
            retention_ns=fragment.retention_ns or above.retention_ns,
            flush_interval_ns=fragment.flush_interval_ns or above.flush_interval_ns,
            path_postfix_template=fragment.path_postfix_template or above.path_postfix_template,
        ),
        flags=own.flags or theirs.flags,
        max_append_rate=own.max_append_rate or theirs.max_append_rate,
    )
    return replace(
        child,
        spec=spec,
        delete=parent.delete if child.delete is None else child.delete,
        no_stores=child.no_stores if has_own_stores else parent.no_stores,
    )


def hoist(journals: Iterable[tuple[JournalSpec, int]]) -> SpecNode:
    """The tree of journals, given with their mod revisions, in which shared values are pulled up.

    Journals are grouped by the longest prefixes ending in `/` that two or more share. `flatten` of the result
    gives the journals back, in order of name. No journals give an empty node.
    """
    nodes = [SpecNode(spec, revision=revision) for spec, revision in journals]
    nodes.sort(key=lambda node: node.name)
    return hoist_tree(_group(nodes)) if nodes else SpecNode()


def _group(nodes: list[SpecNode]) -> SpecNode:
    """The tree of nodes that are sorted by name."""
    if len(nodes) == 1:
        return nodes[0]
    # Being sorted, what the first and last share is what all share.
    prefix = _shared_directory(nodes[0].name, nodes[-1].name)
    children: list[SpecNode] = []
    start = 0
    while start < len(nodes):
        segment_end = nodes[start].name.find("/", len(prefix))
        end = start + 1
        if segment_end >= 0:
            segment = nodes[start].name[: segment_end + 1]
            while end < len(nodes) and nodes[end].name.startswith(segment):
                end += 1
        children.append(_group(nodes[start:end]))
        start = end
    return SpecNode(JournalSpec(name=prefix), children=tuple(children))


def _shared_directory(left: str, right: str) -> str:
    """The longest prefix of both that is empty or ends in `/`."""
    end = 0
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            break
        if one == "/":
            end = index + 1
    return left[:end]


def hoist_tree(tree: SpecNode) -> SpecNode:
    """The tree, of the same shape, in which each directory has what all its children share, and they do not.

    The tree must be one whose values are pushed down. `suspend` and `delete` stay where they are.
    """
    if not tree.children:
        return tree
    children = [hoist_tree(child) for child in tree.children]
    specs = [child.spec for child in children]
    fragments = [spec.fragment for spec in specs]
    shared = JournalSpec(
        name=tree.name,
        replication=_common([spec.replication for spec in specs], 0),
        labels=reduce(intersect, [spec.labels for spec in specs]),
        fragment=FragmentSpec(
            length=_common([it.length for it in fragments], 0),
            compression_codec=_common([it.compression_codec for it in fragments], CompressionCodec.INVALID),
            stores=_common([it.stores for it in fragments], ()),
            refresh_interval_ns=_common([it.refresh_interval_ns for it in fragments], 0),
            retention_ns=_common([it.retention_ns for it in fragments], 0),
            flush_interval_ns=_common([it.flush_interval_ns for it in fragments], 0),
            path_postfix_template=_common([it.path_postfix_template for it in fragments], ""),
        ),
        flags=_common([spec.flags for spec in specs], 0),
        max_append_rate=_common([spec.max_append_rate for spec in specs], 0),
    )
    # An empty list of stores has nothing to override here: a parent has stores only if all its children do.
    lowered = tuple(
        [replace(child, spec=_without(child.spec, shared), no_stores=False) for child in children]
    )
    return replace(tree, spec=shared, delete=None, children=lowered, no_stores=False)


def _without(spec: JournalSpec, shared: JournalSpec) -> JournalSpec:
    """The values of `spec` that it would not inherit from `shared`."""
    own, above = spec.fragment, shared.fragment
    return replace(
        spec,
        replication=_unless(spec.replication, shared.replication, 0),
        labels=subtract(spec.labels, shared.labels),
        fragment=FragmentSpec(
            length=_unless(own.length, above.length, 0),
            compression_codec=_unless(
                own.compression_codec, above.compression_codec, CompressionCodec.INVALID
            ),
            stores=_unless(own.stores, above.stores, ()),
            refresh_interval_ns=_unless(own.refresh_interval_ns, above.refresh_interval_ns, 0),
            retention_ns=_unless(own.retention_ns, above.retention_ns, 0),
            flush_interval_ns=_unless(own.flush_interval_ns, above.flush_interval_ns, 0),
            path_postfix_template=_unless(own.path_postfix_template, above.path_postfix_template, ""),
        ),
        flags=_unless(spec.flags, shared.flags, 0),
        max_append_rate=_unless(spec.max_append_rate, shared.max_append_rate, 0),
    )


def _common(values: Sequence[_T], zero: _T) -> _T:
    first = values[0]
    return first if all(value == first for value in values) else zero


def _unless(value: _T, inherited: _T, zero: _T) -> _T:
    return zero if value == inherited else value


# Reading YAML.


def parse_tree(text: str) -> SpecNode:
    """Read a tree from YAML, strictly: unknown and duplicate keys are refused, as is a second document.

    The result is as written; `flatten` validates it and pushes values down. Raises `ValidationError` with the
    lines of all that is wrong.
    """
    import yaml

    try:
        root = _loader()(text).get_single_node()
        return SpecNode() if root is None else _Decoder(len(text)).decode(root)
    except UnicodeError as err:
        raise ValidationError(f"yaml: {err}") from None
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise ValidationError(f"yaml: {where}{err.problem or err.context}") from None
    except yaml.YAMLError as err:
        raise ValidationError(f"yaml: {err}") from None
    except RecursionError:
        raise ValidationError("yaml: nested too deeply") from None


@cache
def _loader() -> Any:
    """libyaml's parser, where PyYAML has it, with the composer that is written in Python.

    libyaml's own composer recurses in C without a limit: a file of brackets would end the process.
    """
    import yaml
    from yaml.composer import Composer
    from yaml.resolver import Resolver

    if not yaml.__with_libyaml__:
        return yaml.SafeLoader
    parser: Any = vars(yaml.cyaml)["CParser"]

    class Loader(Composer, parser, Resolver):  # type: ignore[misc]
        def __init__(self, text: str) -> None:
            parser.__init__(self, text)
            Composer.__init__(self)
            Resolver.__init__(self)

    return Loader


class _Decoder:
    """Turns composed YAML into nodes, and gathers what is wrong, as Gazette's YAML reader does."""

    def __init__(self, text_length: int) -> None:
        self._problems: list[str] = []
        # Aliases of aliases make a small file stand for more nodes than there is memory. Without aliases each
        # node takes a character at least; with them there is some room.
        self._visits_left = 100_000 + 2 * text_length

    def decode(self, root: yaml.Node) -> SpecNode:
        node = self._node(root)
        if self._problems:
            raise ValidationError("yaml: unmarshal errors:\n  " + "\n  ".join(self._problems))
        return node

    def _node(self, node: yaml.Node) -> SpecNode:
        fields = self._fields(node, "journalspace.Node", _NODE_KEYS)
        fragment, no_stores = self._fragment(fields.get("fragment"))
        children = fields.get("children")
        spec = JournalSpec(
            name=self._string(fields.get("name")),
            replication=self._integer(fields.get("replication"), 32, "int32"),
            labels=self._labels(fields.get("labels")),
            fragment=fragment,
            flags=self._flags(fields.get("flags")),
            max_append_rate=self._integer(fields.get("max_append_rate"), 64, "int64"),
            suspend=self._suspend(fields.get("suspend")),
        )
        return SpecNode(
            spec,
            comment=self._string(fields.get("comment")),
            delete=self._boolean(fields.get("delete")),
            revision=self._integer(fields.get("revision"), 64, "int64"),
            children=tuple([self._node(item) for item in self._items(children, "[]journalspace.Node")]),
            no_stores=no_stores,
        )

    def _labels(self, node: yaml.Node | None) -> LabelSet:
        labels = []
        for item in self._items(node, "[]protocol.Label"):
            fields = self._fields(item, "protocol.Label", _LABEL_KEYS)
            labels.append(
                Label(
                    self._string(fields.get("name")),
                    self._string(fields.get("value")),
                    self._boolean(fields.get("prefix")) or False,
                )
            )
        return LabelSet(tuple(labels)) if labels else EMPTY_LABEL_SET

    def _fragment(self, node: yaml.Node | None) -> tuple[FragmentSpec, bool]:
        fields = self._fields(node, "protocol.JournalSpec_Fragment", _FRAGMENT_KEYS)
        stores = fields.get("stores")
        fragment = FragmentSpec(
            length=self._integer(fields.get("length"), 64, "int64"),
            compression_codec=self._codec(fields.get("compression_codec")),
            stores=tuple([self._string(item) for item in self._items(stores, "[]protocol.FragmentStore")]),
            refresh_interval_ns=self._duration(fields.get("refresh_interval")),
            retention_ns=self._duration(fields.get("retention")),
            flush_interval_ns=self._duration(fields.get("flush_interval")),
            path_postfix_template=self._string(fields.get("path_postfix_template")),
        )
        return fragment, stores is not None and not _is_null(stores) and not fragment.stores

    def _suspend(self, node: yaml.Node | None) -> Suspend | None:
        if node is None or _is_null(node):
            return None
        fields = self._fields(node, "protocol.JournalSpec_Suspend", _SUSPEND_KEYS)
        return Suspend(self._level(fields.get("level")), self._integer(fields.get("offset"), 64, "int64"))

    # Enums. Their errors stand alone: they are those of the enum's own decoder.

    def _codec(self, node: yaml.Node | None) -> CompressionCodec:
        name = self._string(node)
        if not name:
            return CompressionCodec.INVALID
        try:
            return CompressionCodec[name]
        except KeyError:
            raise _bad_enum(name, "CompressionCodec", CompressionCodec.__members__) from None

    def _flags(self, node: yaml.Node | None) -> int:
        if node is None or _is_null(node):
            return 0
        if _is_tagged(node, "int"):
            return self._integer(node, 32, "uint32", signed=False)
        name = self._string(node)
        try:
            return int(JournalFlags[name])
        except KeyError:
            raise _bad_enum(name, "JournalSpec_Flag", JournalFlags.__members__) from None

    def _level(self, node: yaml.Node | None) -> SuspendLevel:
        if node is None or _is_null(node):
            return SuspendLevel.NONE
        if _is_tagged(node, "int"):
            return SuspendLevel(self._integer(node, 32, "int32"))
        name = self._string(node)
        try:
            return SuspendLevel[name]
        except KeyError:
            raise _bad_enum(name, "JournalSpec_Suspend_Level", SuspendLevel.__members__) from None

    # Values. An absent or null one is zero.

    def _string(self, node: yaml.Node | None) -> str:
        if node is None or _is_null(node):
            return ""
        if not _is_scalar(node):
            self._wrong_type(node, "string")
            return ""
        return str(node.value)  # as it is written, whatever type YAML sees in it

    def _integer(self, node: yaml.Node | None, bits: int, go_type: str, *, signed: bool = True) -> int:
        if node is None or _is_null(node):
            return 0
        if not _is_tagged(node, "int"):
            self._wrong_type(node, go_type)
            return 0
        number = _yaml_integer(node)
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        if not low <= number <= high:
            self._wrong_type(node, go_type)
            return 0
        return number

    def _boolean(self, node: yaml.Node | None) -> bool | None:
        if node is None or _is_null(node):
            return None
        if not _is_tagged(node, "bool"):
            self._wrong_type(node, "bool")
            return None
        return str(node.value).lower() in ("yes", "true", "on")

    def _duration(self, node: yaml.Node | None) -> int:
        if node is None or _is_null(node) or _is_tagged(node, "int"):
            return self._integer(node, 64, "time.Duration")  # a bare number is of nanoseconds
        if _is_scalar(node):
            try:
                return parse_duration(str(node.value))
            except ValidationError:
                pass
        self._wrong_type(node, "time.Duration")
        return 0

    def _items(self, node: yaml.Node | None, go_type: str) -> list[yaml.Node]:
        if node is None or _is_null(node):
            return []
        import yaml

        if not isinstance(node, yaml.SequenceNode):
            self._wrong_type(node, go_type)
            return []
        self._visit(len(node.value))
        return list(node.value)

    def _fields(self, node: yaml.Node | None, go_type: str, known: frozenset[str]) -> dict[str, yaml.Node]:
        """The values of a mapping by key; wrong keys become problems."""
        if node is None or _is_null(node):
            return {}
        import yaml

        if not isinstance(node, yaml.MappingNode):
            self._wrong_type(node, go_type)
            return {}
        self._visit(len(node.value))
        fields: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(key.value) if _is_scalar(key) else ""
            line = key.start_mark.line + 1
            if name not in known:
                shown = name if _is_scalar(key) else "that is not a string"
                self._problems.append(f"line {line}: field {shown} not found in type {go_type}")
            elif name in fields:
                self._problems.append(f"line {line}: field {name} already set in type {go_type}")
            else:
                fields[name] = value
        return fields

    def _visit(self, count: int) -> None:
        self._visits_left -= count
        if self._visits_left < 0:
            raise ValidationError("yaml: document contains excessive aliasing")

    def _wrong_type(self, node: yaml.Node, go_type: str) -> None:
        kind = node.tag.rpartition(":")[2].lstrip("!")
        shown = f"!!{kind} `{node.value}`" if _is_scalar(node) else f"!!{kind}"
        self._problems.append(f"line {node.start_mark.line + 1}: cannot unmarshal {shown} into {go_type}")


_FRAGMENT_KEYS = frozenset(
    {
        "length",
        "compression_codec",
        "stores",
        "refresh_interval",
        "retention",
        "flush_interval",
        "path_postfix_template",
    }
)
_LABEL_KEYS = frozenset({"name", "value", "prefix"})
_SUSPEND_KEYS = frozenset({"level", "offset"})
_NODE_KEYS = frozenset(
    {
        "comment",
        "delete",
        "name",
        "replication",
        "labels",
        "fragment",
        "flags",
        "max_append_rate",
        "suspend",
        "revision",
        "children",
    }
)


def _is_scalar(node: yaml.Node) -> bool:
    return type(node.value) is str


def _is_tagged(node: yaml.Node, tag: str) -> bool:
    return bool(node.tag == f"tag:yaml.org,2002:{tag}") and _is_scalar(node)


def _is_null(node: yaml.Node) -> bool:
    return _is_tagged(node, "null")


def _yaml_integer(node: yaml.Node) -> int:
    import yaml

    assert isinstance(node, yaml.ScalarNode)  # the caller looked
    # Octal, hexadecimal, `1_000` and the rest of YAML 1.1.
    return int(yaml.constructor.SafeConstructor().construct_yaml_int(node))


def _bad_enum(name: str, go_type: str, options: Iterable[str]) -> ValidationError:
    listed = ", ".join(option for option in options if option != "LZ4")
    return ValidationError(f"{go_quote(name)} is not a valid {go_type} (options are [{listed}])")


# Writing YAML.


def format_tree(tree: SpecNode) -> str:
    """The YAML of a tree, to the letter as Gazette writes it: zero values left out, enums by name."""
    lines = _node_lines(tree)
    return "\n".join(lines) + "\n" if lines else "{}\n"


def _node_lines(node: SpecNode) -> list[str]:
    spec = node.spec
    lines: list[str] = []
    if node.comment:
        lines.append(f"comment: {_scalar(node.comment)}")
    if node.delete is not None:
        lines.append(f"delete: {'true' if node.delete else 'false'}")
    if spec.name:
        lines.append(f"name: {_scalar(spec.name)}")
    if spec.replication:
        lines.append(f"replication: {spec.replication}")
    if spec.labels:
        lines.append("labels:")
        for label in spec.labels:
            lines += (f"- name: {_scalar(label.name)}", f"  value: {_scalar(label.value)}")
            if label.prefix:
                lines.append("  prefix: true")
    lines += _fragment_lines(spec.fragment, no_stores=node.no_stores)
    if spec.flags:
        lines.append(f"flags: {_flags_text(spec.flags)}")
    if spec.max_append_rate:
        lines.append(f"max_append_rate: {spec.max_append_rate}")
    if spec.suspend is not None:
        lines += _suspend_lines(spec.suspend)
    if node.revision:
        lines.append(f"revision: {node.revision}")
    if node.children:
        lines.append("children:")
        for child in node.children:
            lines += _list_item(_node_lines(child))
    return lines


def _fragment_lines(fragment: FragmentSpec, *, no_stores: bool) -> list[str]:
    lines = []
    if fragment.length:
        lines.append(f"  length: {fragment.length}")
    if fragment.compression_codec:
        lines.append(f"  compression_codec: {fragment.compression_codec.name}")
    if fragment.stores:
        lines.append("  stores:")
        lines += [f"  - {_scalar(store)}" for store in fragment.stores]
    elif no_stores:
        lines.append("  stores: []")
    for key, duration_ns in (
        ("refresh_interval", fragment.refresh_interval_ns),
        ("retention", fragment.retention_ns),
        ("flush_interval", fragment.flush_interval_ns),
    ):
        if duration_ns:
            lines.append(f"  {key}: {format_duration(duration_ns)}")
    if fragment.path_postfix_template:
        lines.append(f"  path_postfix_template: {_scalar(fragment.path_postfix_template)}")
    return ["fragment:", *lines] if lines else []


def _suspend_lines(suspend: Suspend) -> list[str]:
    lines = []
    if suspend.level:
        lines.append(f"  level: {suspend.level.name}")
    if suspend.offset:
        lines.append(f"  offset: {suspend.offset}")
    return ["suspend:", *lines] if lines else ["suspend: {}"]


def _flags_text(flags: int) -> str:
    try:
        return JournalFlags(flags).name
    except ValueError:
        return str(flags)


def _list_item(lines: list[str]) -> list[str]:
    if not lines:
        return ["- {}"]
    return [f"- {lines[0]}", *[f"  {line}" for line in lines[1:]]]


@lru_cache(maxsize=4096)
def _scalar(text: str) -> str:
    """`text` as a YAML scalar on one line: plain if it can be, in double quotes if it would be read as
    another type, else in single quotes."""
    import yaml

    if _needs_escapes(text):
        return _double_quoted(text)
    node = yaml.ScalarNode("", text)
    resolved = _resolver().resolve(type(node), text, (True, False))
    # Readers of YAML 1.1 disagree on whether `y` and `n` are booleans: quoted, they agree.
    if resolved != "tag:yaml.org,2002:str" or text in ("y", "Y", "n", "N"):
        return _double_quoted(text)
    # PyYAML's emitter knows best where a plain scalar is possible.
    written = yaml.safe_dump(text, width=1 << 30, allow_unicode=True)
    return str(written.removesuffix("\n").removesuffix("\n..."))


@cache
def _resolver() -> Any:
    import yaml

    return yaml.resolver.Resolver()


def _needs_escapes(text: str) -> bool:
    return not all(char == " " or (char.isprintable() and not char.isspace()) for char in text)


def _double_quoted(text: str) -> str:
    out = []
    for char in text:
        code = ord(char)
        if char in _ESCAPES:
            out.append(_ESCAPES[char])
        elif not _needs_escapes(char):
            out.append(char)
        elif code < 0x100:
            out.append(f"\\x{code:02X}")
        else:
            out.append(f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}")
    return '"' + "".join(out) + '"'


_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
