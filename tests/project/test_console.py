"""The parts of the terminal example: keys from bytes, the line editor, the page, and the screen."""

from __future__ import annotations

import unicodedata

import pyte
from console.cells import clusters, harmless
from console.editor import Editor, Line
from console.keys import ESCAPE_S, PASTE_S, SEQUENCE_S, Decoder, Event, Key, Pasted, Typed
from console.page import Page, Run, Style, wrap
from console.screen import COLOURS, PROMPT, Frame, Status, View, draw, page_height, paint
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sweeps import sweep

often = settings(max_examples=120, deadline=None, derandomize=True)

# A letter, a character of several bytes, one of two cells, an accent, an emoji of several characters, blanks.
ALPHABET = ["a", "_", "é", "日", "e\u0301", "\u0301", "👩\u200d💻", " ", "\n"]
texts = st.lists(st.sampled_from(ALPHABET), max_size=24).map("".join)
one_line = texts.map(lambda text: text.replace("\n", ""))


# --- keys -----------------------------------------------------------------------------------------

KEYS: list[tuple[bytes, list[Event]]] = [
    (b"hello", [Typed("hello")]),
    ("é日👩".encode(), [Typed("é日👩")]),
    (b"\r", [Key("enter")]),
    (b"\n", [Key("newline")]),
    (b"\x1b\r", [Key("newline")]),
    (b"\t", [Key("tab")]),
    (b"\x7f", [Key("backspace")]),
    (b"\x08", [Key("backspace")]),
    (b"\x03", [Key("ctrl-c")]),
    (b"\x04", [Key("ctrl-d")]),
    (b"\x1a", [Key("ctrl-z")]),
    (b"\x00\x1c\x1f", []),
    (b"\x1b[A\x1b[B\x1b[C\x1b[D", [Key("up"), Key("down"), Key("right"), Key("left")]),
    (b"\x1bOA\x1bOB\x1bOC\x1bOD", [Key("up"), Key("down"), Key("right"), Key("left")]),
    (b"\x1b[H\x1b[F\x1bOH\x1bOF", [Key("home"), Key("end")] * 2),
    (b"\x1b[1~\x1b[4~\x1b[7~\x1b[8~", [Key("home"), Key("end")] * 2),
    (b"\x1b[3~\x1b[5~\x1b[6~", [Key("delete"), Key("page-up"), Key("page-down")]),
    (b"\x1bOM", [Key("enter")]),
    (b"\x1b[1;5D\x1b[1;3C\x1bb\x1bf", [Key("ctrl-left"), Key("ctrl-right")] * 2),
    (b"\x1b[1;2D", [Key("left")]),
    (b"\x1b\x7f\x1bd", [Key("ctrl-w"), Key("alt-d")]),
    # Ignored: function keys, a terminal's answer, a focus event, the end of a paste without its beginning.
    (b"\x1b[15~\x1bOP\x1b[[A\x1b[?1;2c\x1b[I\x1b[2~\x1b[201~\x1b[M", []),
    # On a slow connection, what was typed after Esc comes with it.
    (b"\x1bx", [Key("escape"), Typed("x")]),
    (b"\x1b\x1b[A", [Key("escape"), Key("up")]),
    (b"\x1b\x03", [Key("escape"), Key("ctrl-c")]),
    ("\x1bé".encode(), [Key("escape"), Typed("é")]),
    (b"\x1bOk", [Key("escape"), Typed("Ok")]),
    (b"\x1b[\x03", [Key("escape"), Typed("["), Key("ctrl-c")]),
    (b"\x1b[200~one\r\ntwo\rthree\x1b[Afour\t\x03\x1b[201~five", [Pasted("one\ntwo\nthree[Afour\t"), Typed("five")]),
    (b"\x1b[200~\x1b[201~", [Pasted("")]),
    (b"\xff\x03", [Typed("\ufffd"), Key("ctrl-c")]),
    (b"\xe6\x97\x03", [Typed("\ufffd"), Key("ctrl-c")]),
    ("\x9b".encode(), []),
]


def joined(events: list[Event]) -> list[Event]:
    """The events, with successive typed texts joined."""
    whole: list[Event] = []
    for event in events:
        if isinstance(event, Typed) and whole and isinstance(whole[-1], Typed):
            whole[-1] = Typed(whole[-1].text + event.text)
        else:
            whole.append(event)
    return whole


@sweep(("data", "events"), KEYS)
def test_what_a_terminal_sends_is_a_key_or_text_also_byte_by_byte(data, events):
    decoder = Decoder()
    assert decoder.feed(data) == events
    assert decoder.patience_s is None
    assert joined([event for byte in data for event in decoder.feed(bytes([byte]))]) == joined(events)


pieces = st.sampled_from([data for data, _ in KEYS] + [b"\x1b", b"\x1b[", b"\x1b[200~", b"[", b"O", b"1;", b"\x80"])


@often
@given(st.lists(pieces | st.binary(max_size=6)), st.data())
def test_however_bytes_are_cut_the_events_are_the_same(parts, data):
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    at_once, in_pieces = Decoder(), Decoder()
    events = at_once.feed(whole)
    got = [e for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True) for e in in_pieces.feed(whole[a:b])]
    assert joined(got) == joined(events)
    assert in_pieces.patience_s == at_once.patience_s
    assert in_pieces.settle() == at_once.settle()


@often
@given(st.lists(pieces | st.binary(max_size=6)))
def test_nothing_is_typed_that_is_no_text_and_nothing_is_held_for_ever(parts):
    decoder = Decoder()
    events = decoder.feed(b"".join(parts))
    while decoder.patience_s is not None:
        events += decoder.settle()
    for event in events:
        match event:
            case Typed(text):
                assert text
                assert "Cc" not in map(unicodedata.category, text)
            case Pasted(text):
                assert "Cc" not in map(unicodedata.category, text.replace("\n", "").replace("\t", ""))


@sweep(
    ("data", "patience_s", "events"),
    [
        (b"\x1b", ESCAPE_S, [Key("escape")]),
        (b"\x1b[", SEQUENCE_S, [Key("escape"), Typed("[")]),
        (b"\x1bO", SEQUENCE_S, [Key("escape"), Typed("O")]),
        (b"\x1b[1;", SEQUENCE_S, [Key("escape"), Typed("[1;")]),
        (b"\x1b[200~one\x1b[20", PASTE_S, [Pasted("one[20")]),
    ],
)
def test_what_is_open_is_settled_when_nothing_more_comes(data, patience_s, events):
    decoder = Decoder()
    assert decoder.feed(data) == []
    assert decoder.patience_s == patience_s
    assert decoder.settle() == events
    assert decoder.patience_s is None
    assert decoder.settle() == []
    assert decoder.feed(b"a\x1b[A") == [Typed("a"), Key("up")]


def test_a_sequence_without_end_holds_nothing_up():
    decoder = Decoder()
    events = decoder.feed(b"\x1b[" + b"1" * 1000)
    assert joined(events) == [Key("escape"), Typed("[" + "1" * 1000)]


# --- the line editor ------------------------------------------------------------------------------


def line(marked: str) -> Line:
    """A line editor's state from a text with a bar at the cursor."""
    before, _, after = marked.partition("|")
    return Line(before + after, len(before))


def marked(of: Line) -> str:
    return of.text[: of.cursor] + "|" + of.text[of.cursor :]


def pressed(begin: str, *names: str) -> str:
    editor = Editor()
    editor.line = line(begin)
    for name in names:
        assert editor.press(Key(name)) is None
    return marked(editor.line)


@sweep(
    ("before", "key", "after"),
    [
        ("ab|", "left", "a|b"),
        ("|ab", "left", "|ab"),
        ("a|b", "right", "ab|"),
        ("ab|", "right", "ab|"),
        ("日|本", "backspace", "|本"),
        ("ae\u0301|b", "backspace", "a|b"),
        ("a👩\u200d💻|", "left", "a|👩\u200d💻"),
        ("|e\u0301b", "delete", "|b"),
        ("|", "backspace", "|"),
        ("|", "delete", "|"),
        ("one two|", "ctrl-left", "one |two"),
        ("one |two", "ctrl-left", "|one two"),
        ("|one two", "ctrl-right", "one| two"),
        ("one| two", "ctrl-right", "one two|"),
        ("one two_3()|", "ctrl-w", "one |"),
        ("one| two", "alt-d", "one|"),
        ("ab\ncd|\nef", "home", "ab\n|cd\nef"),
        ("ab\n|cd\nef", "end", "ab\ncd|\nef"),
        ("ab\nc|d\nef", "ctrl-k", "ab\nc|\nef"),
        ("ab|\ncd", "ctrl-k", "ab|cd"),
        ("ab\ncd|", "ctrl-u", "ab\n|"),
        ("abc\nd|", "up", "a|bc\nd"),
        ("a\nbcd|", "up", "a|\nbcd"),
        ("abc|\nd\nefg", "down", "abc\nd|\nefg"),
        ("|\nb", "down", "\n|b"),
        ("a|b", "newline", "a\n|b"),
        ("a|", "tab", "a    |"),
        ("a|b", "page-up", "a|b"),
        ("|ab", "ctrl-d", "|b"),
    ],
)
def test_keys_edit_the_line(before, key, after):
    assert pressed(before, key) == after


EDITING = [
    "newline", "tab", "backspace", "delete", "left", "right", "ctrl-left", "ctrl-right", "home", "end", "ctrl-k",
    "ctrl-u", "ctrl-w", "alt-d", "up", "down", "enter",
]  # fmt: skip


@often
@given(st.lists(st.sampled_from(EDITING).map(Key) | texts.filter(bool).map(Typed) | texts.map(Pasted)))
@example([Typed("\u0301"), Key("home"), Typed("e")])
def test_the_cursor_is_never_within_a_character(events):
    editor = Editor()
    for event in events:
        editor.press(event)
        cursor = editor.line.cursor
        assert 0 <= cursor <= len(editor.line.text)
        assert not any(c.begin < cursor < c.end for c in clusters(editor.line.text))


@often
@given(texts, st.data())
def test_what_is_inserted_can_be_taken_back_character_by_character(text, data):
    editor = Editor()
    editor.press(Pasted(text))
    for _ in range(len(text)):
        editor.press(Key("backspace"))
    assert editor.line == Line()


@often
@given(texts)
def test_going_left_all_the_way_and_right_again_passes_each_character_once(text):
    editor = Editor()
    editor.press(Pasted(text))
    end, stops = editor.line, [editor.line.cursor]
    while editor.line.cursor:
        editor.press(Key("left"))
        stops.append(editor.line.cursor)
    assert stops[::-1] == sorted({0, *(c.end for c in clusters(text))})
    for _ in stops[1:]:
        editor.press(Key("right"))
    assert editor.line == end


def test_enter_hands_in_the_line_and_begins_another():
    editor = Editor()
    editor.press(Typed("one"))
    assert editor.press(Key("enter")) == "one"
    assert editor.line == Line()
    editor.press(Typed("  "))
    assert editor.press(Key("enter")) is None
    assert editor.line.text == "  "


def test_up_and_down_go_through_the_history_and_back():
    editor = Editor()
    for text in ("one", "two", "two", "three\nlines\nlong"):
        editor.press(Typed(text))
        editor.press(Key("enter"))
    editor.press(Typed("new"))
    seen = []
    for key in ["up"] * 6 + ["down"] * 6:
        editor.press(Key(key))
        seen.append(marked(editor.line))
    three = ["three\nlines\nlong|", "three\nline|s\nlong", "thre|e\nlines\nlong"]
    assert seen[:6] == [*three, "two|", "one|", "one|"]
    assert seen[6:] == ["two|", "three\nlines\nlong|", "new|", "new|", "new|", "new|"]


# --- the page -------------------------------------------------------------------------------------


def words(*rows: str) -> list[tuple[Run, ...]]:
    return [(Run(row),) if row else () for row in rows]


@sweep(
    ("text", "width", "rows"),
    [
        ("", 4, [""]),
        ("abcd", 4, ["abcd"]),
        ("abcde", 4, ["abcd", "e"]),
        ("one two", 5, ["one ", "two"]),
        ("one two", 3, ["one", "two"]),
        ("one   two", 4, ["one ", "two"]),
        ("    abcdef", 6, ["    ab", "cdef"]),
        ("日本語", 5, ["日本", "語"]),
        ("日", 1, ["?"]),
        ("e\u0301e\u0301", 1, ["e\u0301", "e\u0301"]),
    ],
)
def test_lines_are_wrapped_after_words(text, width, rows):
    assert wrap([Run(text)], width) == words(*rows)


@often
@given(st.lists(st.tuples(one_line, st.sampled_from(["plain", "drafted"])), max_size=6), st.integers(1, 12))
def test_no_row_is_wider_than_the_screen_and_nothing_but_blanks_is_lost(runs, width):
    rows = wrap([Run(text, style) for text, style in runs], width)
    shown = "".join(run.text for row in rows for run in row)
    for row in rows:
        assert sum(c.width for c in clusters("".join(run.text for run in row))) <= width
    if width > 1:
        assert shown.replace(" ", "") == "".join(text for text, _ in runs).replace(" ", "")


@often
@given(st.lists(st.tuples(texts, st.sampled_from(["plain", "drafted"])), max_size=8), st.lists(st.integers(1, 20)))
def test_a_page_that_grew_piece_by_piece_is_one_that_was_written_at_once(pieces, widths):
    grown = Page()
    for number, (text, style) in enumerate(pieces):
        grown.write(text, style)
        grown.rows(widths[number] if number < len(widths) else 7)
    lines: list[list[Run]] = [[]]
    for text, style in pieces:
        first, *others = harmless(text).split("\n")
        lines[-1].append(Run(first, style))
        lines += [[Run(other, style)] for other in others]
    assert grown.rows(7) == [row for each in lines for row in wrap(each, 7)]
    assert grown.is_empty == (not any(text for text, _ in pieces))


def test_what_a_terminal_would_obey_is_made_harmless():
    page = Page()
    page.write("a\x1b]0;title\x07\x1b[2J\rb\tc\x9b1m\x7f\u2028", "plain")
    assert page.rows(80) == words("a␛]0;title␇␛[2Jb    c\ufffd1m\ufffd\ufffd")


# --- the screen -----------------------------------------------------------------------------------

STATUS = Status("writing", 0.5, 33.3, 20, 256)


def view(width: int, height: int, *, text: str = "", page: str = "", num_below: int = 0, status=STATUS) -> View:
    written = Page()
    written.write(page, "plain")
    return View(width, height, written.rows(width), num_below, status, line(text), "type something")


def text_of(frame: Frame) -> list[str]:
    return ["".join(run.text for run in row) for row in frame.rows]


def test_the_page_is_above_the_rule_and_the_line_below():
    assert text_of(draw(view(60, 5, page="one\ntwo", text="ab|c"))) == [
        "one",
        "two",
        "",
        "─ writing ─ ░░░░░░░░░░  20 of 256 ─  50% ─  33/s ───────────",
        "> abc",
    ]
    assert draw(view(60, 5, text="ab|c")).cursor == (4, 4)
    assert text_of(draw(view(60, 3)))[-1] == "> type something"


@sweep(
    ("width", "rule"),
    [
        (80, "─ writing ─ ░░░░░░░░░░  20 of 256 ─ drafted  50% accepted ─  33.3 tokens/s ──"),
        (56, "─ writing ─ ░░░░░░░░░░  20 of 256 ─  50% ─  33/s ──"),
        (40, "─ writing ─  20 of 256 ─  50% ─  33/s ──"),
        (30, "─ writing ─  20 of 256 ──"),
        (12, "─ writing ──"),
        (4, "writ"),
    ],
)
def test_the_rule_says_as_much_as_there_is_room_for(width, rule):
    assert text_of(draw(view(width, 3)))[1] == rule.ljust(width, "─")[:width]


def test_the_end_of_the_page_is_shown_or_what_was_scrolled_to():
    page = "\n".join(str(number) for number in range(20))
    assert text_of(draw(view(40, 5, page=page)))[:3] == ["17", "18", "19"]
    scrolled = text_of(draw(view(40, 5, page=page, num_below=10)))
    assert scrolled[:3] == ["7", "8", "9"]
    assert "10 more below" in scrolled[3]


def test_a_long_line_is_shown_where_its_cursor_is():
    lines = "\n".join("abcdefghij"[:n] for n in range(1, 9))
    frame = draw(view(20, 12, text=lines + "|"))
    assert text_of(frame)[-4:] == ["  abcde", "  abcdef", "  abcdefg", "  abcdefgh"]
    assert frame.cursor == (11, 10)
    frame = draw(view(20, 12, text="|" + lines))
    assert text_of(frame)[-4:] == ["> a", "  ab", "  abc", "  abcd"]
    assert frame.cursor == (8, 2)


@often
@given(st.integers(1, 30), st.integers(1, 12), texts, texts, st.integers(0, 5), st.data())
def test_every_screen_is_filled_and_none_overflows(width, height, text, page, num_below, data):
    cursor = data.draw(st.sampled_from([0, *(c.end for c in clusters(text))]))
    of = view(width, height, page=page, text=text[:cursor] + "|" + text[cursor:], num_below=num_below)
    frame = draw(of)
    assert len(frame.rows) == height
    assert page_height(of) < height or height == 1
    for row in text_of(frame):
        assert sum(c.width for c in clusters(row)) <= width
    assert 0 <= frame.cursor[0] < height
    assert 0 <= frame.cursor[1] < width


simple = st.lists(st.sampled_from(["a", "日", "é", " ", "\n"]), max_size=40).map("".join)
styles = st.sampled_from(["plain", "drafted", "thinking", "drafted thinking", "prompt", "note", "error"])


def frames(width: int, height: int) -> st.SearchStrategy[Frame]:
    def frame(written: list[tuple[str, Style]], typed: str) -> Frame:
        page = Page()
        for text, style in written:
            page.write(text, style)
        return draw(View(width, height, page.rows(width), 0, STATUS, Line(typed, len(typed)), "hint"))

    return st.builds(frame, st.lists(st.tuples(simple, styles), max_size=4), simple)


def cells(screen: pyte.Screen) -> list[list[pyte.screens.Char]]:
    return [[screen.buffer[row][column] for column in range(screen.columns)] for row in range(screen.lines)]


@often
@given(st.data(), st.integers(4, 24), st.integers(1, 8))
def test_what_is_painted_over_another_frame_is_what_is_painted_on_nothing(data, width, height):
    before, after = data.draw(frames(width, height)), data.draw(frames(width, height))
    changed, fresh = pyte.Screen(width, height), pyte.Screen(width, height)
    pyte.Stream(changed).feed(paint(None, before, COLOURS) + paint(before, after, COLOURS))
    pyte.Stream(fresh).feed(paint(None, after, COLOURS))
    assert cells(changed) == cells(fresh)
    assert [row.rstrip() for row in fresh.display] == [row.rstrip() for row in text_of(after)]
    for screen in (changed, fresh):
        assert (screen.cursor.y, screen.cursor.x) == after.cursor
        assert not screen.cursor.hidden


def test_nothing_is_sent_for_what_is_there_and_little_for_little():
    page = "\n".join("a" * 70 for _ in range(30))
    before, after = draw(view(80, 24, page=page)), draw(view(80, 24, page=page, text="x|"))
    assert paint(before, before, COLOURS) == ""
    assert len(paint(before, after, COLOURS)) < 100
    assert paint(before, after, COLOURS).count("\x1b[24;1H") == 1
    # After a change of width, the terminal's contents are unknown.
    assert len(paint(before, draw(view(81, 24, page=page)), COLOURS)) > 24 * 70
    assert PROMPT in paint(before, after, COLOURS)
