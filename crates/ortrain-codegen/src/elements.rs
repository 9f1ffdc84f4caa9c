//! Loads and stores of buffer elements, which bindings hold as words.

use ortrain_expr::{DType, Type};
use ortrain_program::BufferId;

use crate::kernel::Kernel;
use crate::repr::{Repr, Value, repr_of, word_of};

/// Returns the value of an element that is narrower than a word, from its bits.
fn value_from_bits(dtype: DType, raw: &str) -> Value {
    match dtype {
        DType::F16 => Value::new(format!("f32_of_f16({raw})"), Repr::F32),
        DType::BF16 => Value::new(format!("f32_of_bf16({raw})"), Repr::F32),
        DType::Bool => Value::new(format!("({raw} != 0u)"), Repr::Bool),
        DType::I8 | DType::I16 => {
            let left = 32 - 8 * dtype.size();
            Value::new(format!("(int_of({raw} << {left}u) >> {left}u)"), Repr::I32)
        }
        _ => Value::new(raw, Repr::U32),
    }
}

/// Returns the value of an element of one word.
fn value_from_word(dtype: DType, word: &str) -> Value {
    match dtype {
        DType::F32 => Value::new(format!("float_of({word})"), Repr::F32),
        DType::I32 => Value::new(format!("int_of({word})"), Repr::I32),
        _ => Value::new(word, Repr::U32),
    }
}

/// Adds an offset to an element index. The index begins with its constant part.
fn offset_index(at: &str, by: isize) -> String {
    let (first, rest) = at.split_once(" + ").unwrap_or((at, ""));
    let sum = first.parse::<isize>().map(|first| first + by);
    match (sum, rest) {
        (Ok(sum), "") => sum.to_string(),
        (Ok(0), rest) => rest.to_owned(),
        (Ok(sum), rest) => format!("{sum} + {rest}"),
        (Err(_), _) if by == 0 => at.to_owned(),
        (Err(_), _) => format!("{by} + {at}"),
    }
}

/// Returns the shift from indices of narrow elements to indices of words, and the mask of the remaining bits.
fn narrow_index_bits(dtype: DType) -> (u32, u32) {
    if dtype.size() == 1 { (2, 3) } else { (1, 1) }
}

impl Kernel<'_> {
    /// Returns an element of a buffer, in the type of computation.
    pub(crate) fn load(&mut self, id: BufferId, at: &str) -> Value {
        let dtype = self.dtype(id);
        let (binding, base) = self.buffer(id);
        let at = offset_index(at, base);
        let word = |at: &str| self.dialect.word(&binding, at);
        match dtype {
            DType::F32 | DType::I32 | DType::U32 => value_from_word(dtype, &word(&at)),
            DType::I64 | DType::U64 | DType::F64 => {
                let repr = repr_of(Type::of(dtype));
                let (low, high) = (word(&format!("2 * ({at})")), word(&format!("2 * ({at}) + 1")));
                Value::new(self.dialect.two_words(repr, &low, &high), repr)
            }
            _ => {
                let index = self.define(Value::new(at, Repr::I32)).text;
                let bits = 8 * dtype.size();
                let (shift, part) = narrow_index_bits(dtype);
                let word = self.dialect.word(&binding, &format!("{index} >> {shift}u"));
                let by = format!("(bits_of_int({index} & {part}) * {bits}u)");
                value_from_bits(dtype, &format!("(({word} >> {by}) & {}u)", (1u32 << bits) - 1))
            }
        }
    }

    /// Returns the bits of a value that is stored in less than a word.
    fn narrow_bits(&self, dtype: DType, value: &Value) -> String {
        let text = &value.text;
        match dtype {
            DType::F16 => format!("f16_of_f32({text})"),
            DType::BF16 => format!("bf16_of_f32({text})"),
            DType::Bool => self.select(text, "1u", "0u"),
            DType::I8 | DType::I16 => format!("bits_of_int({text})"),
            _ => text.clone(),
        }
    }

    /// Writes an element of a buffer. The value has the type of computation.
    pub(crate) fn store(&mut self, id: BufferId, at: &str, value: &Value) {
        let dtype = self.dtype(id);
        let value = self.as_repr(value, repr_of(Type::of(dtype)));
        let (binding, base) = self.buffer(id);
        let at = offset_index(at, base);
        if dtype.size() < 4 {
            let index = self.define(Value::new(at, Repr::I32)).text;
            let bits = 8 * dtype.size();
            let (shift, part) = narrow_index_bits(dtype);
            let raw = self.narrow_bits(dtype, &value);
            let by = self.define(Value::new(format!("bits_of_int({index} & {part}) * {bits}u"), Repr::U32));
            let mask = format!("{}u << {}", (1u32 << bits) - 1, by.text);
            let raw = format!("({raw}) << {}", by.text);
            let line = self.dialect.set_bits(&binding, &format!("{index} >> {shift}u"), &mask, &raw);
            self.line(&line);
        } else if dtype.size() == 8 {
            let value = self.define(value).text;
            let at = self.define(Value::new(format!("2 * ({at})"), Repr::I32)).text;
            for (at, half) in [(at.clone(), "low"), (format!("{at} + 1"), "high")] {
                let line = self.dialect.set_word(&binding, &at, &format!("{half}({value})"));
                self.line(&line);
            }
        } else {
            let line = self.dialect.set_word(&binding, &at, &word_of(&value));
            self.line(&line);
        }
    }

    /// Loads four adjacent elements of a buffer. The index of the first is a multiple of four; elements have at most
    /// one word.
    pub(crate) fn load_quad(&mut self, id: BufferId, at: &str) -> [Value; 4] {
        let dtype = self.dtype(id);
        let (binding, base) = self.buffer(id);
        let index = self.define(Value::new(format!("({}) >> 2u", offset_index(at, base)), Repr::I32)).text;
        if dtype.size() == 4 {
            let quad = self.name();
            let line = self.dialect.define_quad(&quad, &self.dialect.quad(&binding, &index));
            self.line(&line);
            return ["x", "y", "z", "w"].map(|part| value_from_word(dtype, &format!("{quad}.{part}")));
        }
        let (bits, size) = (8 * dtype.size(), dtype.size());
        let words: Vec<String> = (0..size)
            .map(|k| {
                let word = self.dialect.word(&binding, &format!("{index} * {size} + {k}"));
                self.define(Value::new(word, Repr::U32)).text
            })
            .collect();
        [0, 1, 2, 3].map(|k| {
            let (word, by) = (&words[k * size / 4], k * bits % 32);
            value_from_bits(dtype, &format!("(({word} >> {by}u) & {}u)", (1u32 << bits) - 1))
        })
    }

    /// Writes four adjacent elements of a buffer, with the conditions of [`Kernel::load_quad`].
    pub(crate) fn store_quad(&mut self, id: BufferId, at: &str, values: [&Value; 4]) {
        let dtype = self.dtype(id);
        let values: Vec<Value> =
            values.iter().map(|value| self.as_repr(value, repr_of(Type::of(dtype)))).collect();
        let (binding, base) = self.buffer(id);
        let index = self.define(Value::new(format!("({}) >> 2u", offset_index(at, base)), Repr::I32)).text;
        if dtype.size() == 4 {
            let words = [0, 1, 2, 3].map(|k| word_of(&values[k]));
            let line = self.dialect.set_quad(&binding, &index, &words);
            self.line(&line);
            return;
        }
        let (bits, size) = (8 * dtype.size(), dtype.size());
        for (k, values) in values.chunks(4 / size).enumerate() {
            let mask = (1u32 << bits) - 1;
            let part = |(k, value): (usize, &Value)| {
                format!("((({}) & {mask}u) << {}u)", self.narrow_bits(dtype, value), k * bits)
            };
            let word = values.iter().enumerate().map(part).collect::<Vec<_>>().join(" | ");
            let line = self.dialect.set_word(&binding, &format!("{index} * {size} + {k}"), &word);
            self.line(&line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::offset_index;

    #[test]
    fn indices_are_offset() {
        assert_eq!(offset_index("8 + v1 * (4) + v2", -8), "v1 * (4) + v2");
        assert_eq!(offset_index("8 + v1", 4), "12 + v1");
        assert_eq!(offset_index("3", -3), "0");
        assert_eq!(offset_index("v1", 0), "v1");
        assert_eq!(offset_index("v1 + 2", -1), "-1 + v1 + 2");
    }
}
