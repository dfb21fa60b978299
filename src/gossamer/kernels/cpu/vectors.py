"""Instructions for many numbers at once, of which intrinsics are made: a loop of so few is looked at for overlaps, and for a
rest, for longer than it takes.
"""

from typing import Any

from llvmlite import ir

WORD, LONG, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_TOP = -(2**31)


class Vectors:
    """Writes the instructions of an intrinsic for so many numbers at once."""

    def __init__(self, context: Any, builder: Any, lanes: int) -> None:
        self.context, self.builder, self.lanes = context, builder, lanes
        self.ints, self.floats = ir.VectorType(WORD, lanes), ir.VectorType(FLOAT, lanes)

    def member(self, scratch: Any, kind: Any, i: int) -> tuple[Any, Any]:
        """An array of a tuple of arrays, as its type and its value."""
        return kind.types[i], self.builder.extract_value(scratch, i)

    def place(self, array: tuple[Any, Any], index: Any, vector: Any = None) -> Any:
        """The pointer to the vector that begins at an element."""
        data = self.context.make_array(array[0])(self.context, self.builder, array[1]).data
        place = self.builder.gep(data, [index])
        return self.builder.bitcast(place, (vector or self.floats).as_pointer())

    def rows(self, array: tuple[Any, Any], at: Any, stride: Any, count: int) -> list[Any]:
        """The pointers to as many columns of `count` rows."""
        steps = [self.builder.mul(stride, LONG(i)) for i in range(count)]
        return [self.place(array, self.builder.add(at, step)) for step in steps]

    def load(self, place: Any, align: int = 4) -> Any:
        loaded = self.builder.load(place)
        loaded.align = align
        return loaded

    def store(self, values: list[Any], places: list[Any]) -> Any:
        for value, place in zip(values, places, strict=True):
            self.builder.store(value, place).align = 4
        return self.context.get_dummy_value()

    def broadcast(self, value: Any, vector: Any) -> Any:
        """One number in all lanes."""
        none = ir.Constant(vector, ir.Undefined)
        first = self.builder.insert_element(none, value, WORD(0))
        return self.builder.shuffle_vector(first, none, self.constant(0))

    def constant(self, value: int) -> Any:
        return ir.Constant(self.ints, [value] * self.lanes)

    def flip(self, values: Any, words: Any, shifts: Any) -> Any:
        """Change signs where a word, shifted up, has its highest bit set."""
        signs = self.builder.and_(self.builder.shl(words, shifts), self.constant(_TOP))
        bits = self.builder.xor(self.builder.bitcast(values, self.ints), signs)
        return self.builder.bitcast(bits, self.floats)

    def butterflies(self, rows: list[Any], down: bool) -> list[Any]:
        """Sums and differences of rows: of neighbours first, or of neighbours last."""
        steps = [1 << k for k in range(len(rows).bit_length() - 1)]
        for step in reversed(steps) if down else steps:
            for i in [i for i in range(len(rows)) if not i & step]:
                a, b = rows[i], rows[i | step]
                rows[i], rows[i | step] = self.builder.fadd(a, b), self.builder.fsub(a, b)
        return rows

    def halves(self, rows: list[Any]) -> Any:
        """The sum of rows: halves onto halves."""
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [self.builder.fadd(a, b) for a, b in zip(rows[:half], rows[half:], strict=True)]
        return rows[0]
