"""A corpus of malformed data: files of many kinds of rows, each with the outcome that it should have."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq


class Line(NamedTuple):
    """One line of a file.

    Attributes:
        kind: what is wrong with it.
        data: its bytes, without the line break.
        reason: why it should be rejected; "": it should be accepted.
    """

    kind: str
    data: bytes
    reason: str


def turn(role: Any, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _good(i: int) -> list[dict[str, Any]]:
    return [turn("user", f"question {i}"), turn("assistant", f"answer {i}")]


def _json(kind: str, value: Any, reason: str) -> Line:
    return Line(kind, json.dumps(value).encode(), reason)


def mixed_lines(i: int) -> Iterator[Line]:
    """One round of all kinds; `i` makes its conversations different from those of other rounds."""
    good, text = _good(i), json.dumps({"messages": _good(i)}).encode()
    yield Line("valid", text, "")
    yield Line("valid, other columns", json.dumps({"id": i, "score": None, "prompt": f"p {i}"}).encode(), "")
    for broken in (text[:-1], text[1:], text.replace(b'"', b"'"), text + b",", b"{}" + text, b"\xff\xfe" + text):
        yield Line("bad JSON", broken, "bad_json")
    yield Line("bad JSON", b"[" * 100_000, "bad_json")
    for value in ([], [good], 3, "text", None, True):
        yield _json("no object", value, "not_an_object")
    yield Line("blank line", b"", "empty")
    yield Line("blank line", b" \t ", "empty")
    for turns in (3, {"0": good}, "text", True):
        yield _json("wrong type", {"messages": turns}, "wrong_shape")
    for content in (3, 1.5, True, {"text": "x"}, ["x"]):
        yield _json("wrong type", {"messages": [turn("user", content)]}, "wrong_shape")
    yield _json("wrong type", {"messages": [*good, "text"]}, "wrong_shape")
    yield _json("NaN", {"prompt": float("nan")}, "wrong_shape")
    yield _json("NaN in another column", {"prompt": f"nan {i}", "score": float("nan")}, "")
    yield _json("null", {"messages": None}, "wrong_shape")
    yield _json("null", {"prompt": None}, "wrong_shape")
    yield _json("null", {"messages": [turn("user", None)]}, "wrong_shape")
    yield _json("null", {"messages": [turn(None, "x")]}, "bad_role")
    yield _json("null", {"messages": [None]}, "wrong_shape")
    yield _json("lone surrogate", {"prompt": f"{i} \ud800"}, "invalid_text")
    yield _json("lone surrogate", {"messages": [turn("\udfff", "x")]}, "bad_role")
    yield _json("lone surrogate in another column", {"prompt": f"s {i}", "note": "\ud83d"}, "")
    yield Line("raw control character", b'{"prompt": "a\x01b\x00"}', "bad_json")
    yield _json("escaped control character", {"prompt": f"{i} \x00\x1b[31m\x7f\u2028"}, "")
    yield Line("duplicate key", b'{"prompt": "a", "prompt": "b"}', "duplicate_key")
    yield Line("duplicate key", b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "duplicate_key")
    yield _json("not alternating", {"messages": good[::-1]}, "not_alternating")
    yield _json("not alternating", {"messages": [good[0], good[0]]}, "not_alternating")
    yield _json("not alternating", {"messages": [*good, turn("system", "s")]}, "not_alternating")
    yield _json("unknown role", {"messages": [turn("robot", "x")]}, "bad_role")
    yield _json("unknown role", {"messages": [turn(3, "x")]}, "bad_role")
    yield _json("unknown role", {"messages": [turn("", "x")]}, "bad_role")
    yield _json("empty turn", {"messages": [turn("user", "")]}, "empty")
    yield _json("empty turn", {"messages": [good[0], turn("assistant", " \n")]}, "empty")
    yield _json("empty turn", {"messages": []}, "empty")
    yield _json("only system", {"messages": [turn("system", f"be nice {i}")]}, "no_user_turn")
    yield Line("huge integer", b'{"id": ' + b"9" * 5000 + b', "prompt": "x"}', "bad_json")
    yield Line("large integer", b'{"id": ' + b"9" * 400 + b', "prompt": "large %d"}' % i, "")
    yield _json("mixed schema", {"conversations": [{"from": "human", "value": f"sharegpt {i}"}]}, "")
    yield _json("mixed schema", {"conversations": [turn("user", f"both {i}")]}, "")
    yield _json("mixed schema", {"instruction": f"alpaca {i}", "input": "", "output": "o"}, "")
    yield _json("mixed schema", {"text": "no shape of ours"}, "wrong_shape")
    yield _json("tool call", {"messages": [good[0], {**turn("assistant", None), "tool_calls": [{}]}]}, "tool_turn")
    yield _json("picture", {"messages": [turn("user", [{"type": "image_url", "image_url": "x"}])]}, "not_text")
    yield Line("duplicate conversation", json.dumps({"id": "again", "messages": good}).encode(), "duplicate")


def write_corpus(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Writes the files; returns the kind and the reason of each row, by file."""
    folder.mkdir()
    rng = random.Random(0)
    expected: dict[str, list[tuple[str, str]]] = {}

    def write(name: str, lines: list[Line], end: bytes = b"\n", start: bytes = b"") -> None:
        (folder / name).write_bytes(start + b"".join(line.data + end for line in lines))
        expected[name] = [(line.kind, line.reason) for line in lines]

    write("a_mixed.jsonl", [line for i in range(4) for line in mixed_lines(i)])
    junk = [bytes(rng.choices([b for b in range(1, 256) if b != 10], k=60)) for _ in range(30)]
    write("b_binary.jsonl", [Line("binary file", line, "bad_json") for line in junk])
    table = ["id,prompt,answer", *(f'{i},"ask {i}","tell {i}"' for i in range(30))]
    write("c_table.jsonl", [Line("CSV named jsonl", line.encode(), "bad_json") for line in table])
    write("d_empty.jsonl", [])
    rows = [json.dumps({"prompt": f"bom {i}"}).encode() for i in range(3)]
    write("e_crlf.jsonl", [Line("BOM and CRLF", row, "") for row in rows], b"\r\n", b"\xef\xbb\xbf")
    wide = "".join(json.dumps({"prompt": f"wide {i}"}) + "\n" for i in range(3)).encode("utf-16")
    (folder / "f_utf16.jsonl").write_bytes(wide)
    # Line breaks are found as bytes: the last half of the last one makes a row of its own.
    expected["f_utf16.jsonl"] = [("UTF-16 file", "bad_json")] * 4
    long = [b'{"prompt": "%s"}' % (b"%d " % i + b"x" * size) for i, size in enumerate((10 << 20, 10, 17 << 20, 10))]
    reasons = ["", "", "row_too_long", ""]
    kinds = ["10 MB line", "valid", "17 MB line", "valid"]
    write("g_long.jsonl", [Line(*item) for item in zip(kinds, long, reasons, strict=True)])
    write("h_open_end.jsonl", [Line("no line break at the end", b'{"prompt": "the end"}', "")], b"")
    (folder / "i_junk.parquet").write_bytes(junk[0] * 50)
    expected["i_junk.parquet"] = [("no Parquet file", "unreadable_file")]
    shapes = {
        "prompt": ["in a table", None, None, ""],
        "messages": [None, _good(99), None, None],
        "score": [None, None, 1.5, float("nan")],
    }
    pq.write_table(pa.table(shapes), folder / "j_shapes.parquet")
    expected["j_shapes.parquet"] = [("mixed schema", reason) for reason in ("", "", "wrong_shape", "empty")]
    return expected
