//! Element types of at most eight bits that are stored and moved, but not computed with: 8-bit and 4-bit floats, and
//! integers of two and four bits.
//!
//! In memory each element is a byte with its code in the lowest bits. Programs move these bytes as `u8`. A conversion
//! looks the number of a code up in a table of 256, and finds the code of a number by bisection of a table of
//! thresholds; this file makes both tables.
//!
//! Sources: the tables of ONNX Cast-25 (<https://onnx.ai/onnx/operators/onnx__Cast.html>); FP8 formats for deep learning
//! (arXiv:2209.05433), and with one NaN (arXiv:2206.02915); OCP microscaling formats 1.0.

/// Element type of at most eight bits without arithmetic. Discriminants are the values of ONNX's
/// `TensorProto.DataType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(i32)]
pub enum SmallType {
    /// Float with four bits of exponent and three of fraction, without infinities.
    F8E4M3Fn = 17,
    /// As [`SmallType::F8E4M3Fn`], without a negative zero: its code is the only NaN.
    F8E4M3FnUz = 18,
    /// Float with five bits of exponent and two of fraction.
    F8E5M2 = 19,
    /// As [`SmallType::F8E5M2`], without infinities and negative zero: its code is the only NaN.
    F8E5M2FnUz = 20,
    /// Unsigned integer of four bits.
    U4 = 21,
    /// Signed integer of four bits.
    I4 = 22,
    /// Float with two bits of exponent and one of fraction, without infinities and NaN.
    F4E2M1 = 23,
    /// Powers of two from 2^-127 to 2^127, and NaN.
    F8E8M0 = 24,
    /// Unsigned integer of two bits.
    U2 = 25,
    /// Signed integer of two bits.
    I2 = 26,
}

/// Direction in which a conversion to [`SmallType::F8E8M0`] rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PowerRounding {
    /// To the next larger power.
    #[default]
    Up,
    /// To the next smaller power.
    Down,
    /// To the nearest power; from the middle of two on to the larger.
    Nearest,
}

/// Codes of numbers that have no nearest number in a float type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpecialCodes {
    /// Code of NaN; `None` if the type has no NaN.
    pub nan: Option<u8>,
    /// Code of a number above the largest one, without the sign.
    pub overflow: u8,
    /// True if the sign is the highest bit of a code, also of a special one.
    pub has_sign: bool,
    /// True if zero has no sign: the code with a sign and no other bit is NaN.
    pub is_zero_unsigned: bool,
}

impl SmallType {
    /// All types.
    pub const ALL: [SmallType; 10] = [
        SmallType::F8E4M3Fn,
        SmallType::F8E4M3FnUz,
        SmallType::F8E5M2,
        SmallType::F8E5M2FnUz,
        SmallType::U4,
        SmallType::I4,
        SmallType::F4E2M1,
        SmallType::F8E8M0,
        SmallType::U2,
        SmallType::I2,
    ];

    /// Returns the name in `ml_dtypes`, which NumPy uses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            SmallType::F8E4M3Fn => "float8_e4m3fn",
            SmallType::F8E4M3FnUz => "float8_e4m3fnuz",
            SmallType::F8E5M2 => "float8_e5m2",
            SmallType::F8E5M2FnUz => "float8_e5m2fnuz",
            SmallType::U4 => "uint4",
            SmallType::I4 => "int4",
            SmallType::F4E2M1 => "float4_e2m1fn",
            SmallType::F8E8M0 => "float8_e8m0fnu",
            SmallType::U2 => "uint2",
            SmallType::I2 => "int2",
        }
    }

    /// Returns the name in ONNX.
    #[must_use]
    pub fn onnx_name(self) -> &'static str {
        match self {
            SmallType::F8E4M3Fn => "float8e4m3fn",
            SmallType::F8E4M3FnUz => "float8e4m3fnuz",
            SmallType::F8E5M2 => "float8e5m2",
            SmallType::F8E5M2FnUz => "float8e5m2fnuz",
            SmallType::F4E2M1 => "float4e2m1",
            SmallType::F8E8M0 => "float8e8m0",
            SmallType::U4 | SmallType::I4 | SmallType::U2 | SmallType::I2 => self.name(),
        }
    }

    /// Returns the number of bits of an element in a file.
    #[must_use]
    pub fn bits(self) -> usize {
        match self {
            SmallType::U4 | SmallType::I4 | SmallType::F4E2M1 => 4,
            SmallType::U2 | SmallType::I2 => 2,
            _ => 8,
        }
    }

    /// Returns the smallest and the largest integer of an integer type.
    #[must_use]
    pub fn integer_range(self) -> Option<(i32, i32)> {
        match self {
            SmallType::U4 => Some((0, 15)),
            SmallType::I4 => Some((-8, 7)),
            SmallType::U2 => Some((0, 3)),
            SmallType::I2 => Some((-2, 1)),
            _ => None,
        }
    }

    /// Returns bits of exponent and fraction, and the bias of the exponent, of a float type with a sign.
    fn format(self) -> Option<(u32, u32, i32)> {
        match self {
            SmallType::F8E4M3Fn => Some((4, 3, 7)),
            SmallType::F8E4M3FnUz => Some((4, 3, 8)),
            SmallType::F8E5M2 => Some((5, 2, 15)),
            SmallType::F8E5M2FnUz => Some((5, 2, 16)),
            SmallType::F4E2M1 => Some((2, 1, 1)),
            _ => None,
        }
    }

    /// Returns the code of the largest finite number.
    fn largest_code(self) -> u8 {
        match self {
            SmallType::F8E4M3Fn => 0x7E,
            SmallType::F8E4M3FnUz | SmallType::F8E5M2FnUz => 0x7F,
            SmallType::F8E5M2 => 0x7B,
            SmallType::F4E2M1 => 7,
            _ => 254,
        }
    }

    /// Returns the codes of NaN, and of numbers above the largest one. With `saturates` these are the largest number.
    #[must_use]
    pub fn special_codes(self, saturates: bool) -> SpecialCodes {
        let largest = self.largest_code();
        let (nan, infinity) = match self {
            SmallType::F8E4M3Fn => (Some(0x7F), 0x7F),
            SmallType::F8E4M3FnUz | SmallType::F8E5M2FnUz => (Some(0x80), 0x80),
            SmallType::F8E5M2 => (Some(0x7F), 0x7C),
            SmallType::F8E8M0 => (Some(0xFF), 0xFF),
            _ => (None, largest),
        };
        SpecialCodes {
            nan,
            overflow: if saturates { largest } else { infinity },
            has_sign: self != SmallType::F8E8M0,
            is_zero_unsigned: matches!(self, SmallType::F8E4M3FnUz | SmallType::F8E5M2FnUz),
        }
    }

    /// Returns the number of a code.
    #[must_use]
    pub fn decode(self, code: u8) -> f32 {
        if let Some((low, high)) = self.integer_range() {
            let span = high - low + 1;
            let number = i32::from(code) & (span - 1);
            return (if number > high { number - span } else { number }) as f32;
        }
        let Some((exponent_bits, fraction_bits, bias)) = self.format() else {
            return if code == 0xFF { f32::NAN } else { 2f32.powi(i32::from(code) - 127) };
        };
        let code = code & (((1u16 << self.bits()) - 1) as u8);
        let sign_bit = 1u8 << (self.bits() - 1);
        let special = self.special_codes(false);
        let magnitude = code & (sign_bit - 1);
        if special.is_zero_unsigned && code == sign_bit {
            return f32::NAN;
        }
        let sign = if code & sign_bit == 0 { 1.0 } else { -1.0 };
        if magnitude > self.largest_code() {
            return if self == SmallType::F8E5M2 && magnitude == special.overflow {
                sign * f32::INFINITY
            } else {
                f32::NAN
            };
        }
        let (exponent, fraction) = (magnitude >> fraction_bits, magnitude & ((1 << fraction_bits) - 1));
        debug_assert!(u32::from(exponent) < 1 << exponent_bits);
        let unit = f32::from(fraction) / (1u32 << fraction_bits) as f32;
        let value = match exponent {
            0 => unit * 2f32.powi(1 - bias),
            _ => (1.0 + unit) * 2f32.powi(i32::from(exponent) - bias),
        };
        sign * value
    }

    /// Returns the numbers of all 256 codes.
    #[must_use]
    pub fn numbers(self) -> Vec<f32> {
        (0..=u8::MAX).map(|code| self.decode(code)).collect()
    }

    /// Returns the smallest magnitude of each code from 1 on that rounds to this code or a larger one, and behind the
    /// largest code the smallest one that overflows. Positions behind are infinite. The length is a power of two.
    ///
    /// Numbers round to the nearest, and from the middle of two to the even code.
    #[must_use]
    pub fn thresholds(self, rounding: PowerRounding) -> Vec<f32> {
        let largest = usize::from(self.largest_code());
        let count = (largest + 2).next_power_of_two();
        let value = |code: usize| match code > largest {
            true if self == SmallType::F8E8M0 => f32::INFINITY,
            // The number behind the largest one, if the type had it.
            true => 2.0 * self.decode(largest as u8) - self.decode(largest as u8 - 1),
            false => self.decode(code as u8),
        };
        let threshold = |code: usize| {
            if code > largest + 1 {
                return f32::INFINITY;
            }
            let (below, above) = (value(code - 1), value(code));
            if self == SmallType::F8E8M0 {
                return match rounding {
                    PowerRounding::Up => below.next_up(),
                    PowerRounding::Down => above,
                    PowerRounding::Nearest => below * 1.5,
                };
            }
            let middle = below + (above - below) / 2.0;
            if code.is_multiple_of(2) { middle } else { middle.next_up() }
        };
        (0..count).map(|code| if code == 0 { 0.0 } else { threshold(code) }).collect()
    }

    /// Returns the code of a number. Integers truncate and wrap; floats round as [`SmallType::thresholds`] says.
    #[must_use]
    pub fn encode(self, number: f32, saturates: bool, rounding: PowerRounding) -> u8 {
        if let Some((low, high)) = self.integer_range() {
            return ((number as i32) & (high - low)) as u8;
        }
        let special = self.special_codes(saturates);
        let sign = if special.has_sign && number.is_sign_negative() { 1u8 << (self.bits() - 1) } else { 0 };
        if number.is_nan() {
            return special.nan.unwrap_or(0) | if special.is_zero_unsigned { 0 } else { sign };
        }
        let thresholds = self.thresholds(rounding);
        let code = thresholds.partition_point(|&threshold| threshold <= number.abs()) - 1;
        if code > usize::from(self.largest_code()) {
            return special.overflow | sign;
        }
        if code == 0 && special.is_zero_unsigned { 0 } else { code as u8 | sign }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOATS: [SmallType; 5] = [
        SmallType::F8E4M3Fn,
        SmallType::F8E4M3FnUz,
        SmallType::F8E5M2,
        SmallType::F8E5M2FnUz,
        SmallType::F4E2M1,
    ];

    #[test]
    fn largest_and_smallest_numbers() {
        for (small, largest, least) in [
            (SmallType::F8E4M3Fn, 448.0, 2f32.powi(-9)),
            (SmallType::F8E4M3FnUz, 240.0, 2f32.powi(-10)),
            (SmallType::F8E5M2, 57344.0, 2f32.powi(-16)),
            (SmallType::F8E5M2FnUz, 57344.0, 2f32.powi(-17)),
            (SmallType::F4E2M1, 6.0, 0.5),
        ] {
            assert_eq!(small.decode(small.largest_code()), largest, "{}", small.name());
            assert_eq!(small.decode(1), least, "{}", small.name());
        }
        assert_eq!(SmallType::F8E8M0.decode(254), 2f32.powi(127));
        assert!(SmallType::F8E8M0.decode(255).is_nan());
        assert_eq!(SmallType::F8E5M2.decode(0xFC), f32::NEG_INFINITY);
    }

    #[test]
    fn every_code_round_trips() {
        for small in FLOATS {
            for code in 0..=((1u16 << small.bits()) - 1) as u8 {
                let number = small.decode(code);
                if number.is_finite() {
                    let again = small.encode(number, true, PowerRounding::Up);
                    assert_eq!(again, code, "{} {number}", small.name());
                }
            }
        }
        for small in [SmallType::U4, SmallType::I4, SmallType::U2, SmallType::I2] {
            let (low, high) = small.integer_range().expect("an integer type");
            for number in low..=high {
                let code = small.encode(number as f32, true, PowerRounding::Up);
                assert_eq!(small.decode(code), number as f32);
            }
        }
    }

    #[test]
    fn middles_round_to_even_codes() {
        for small in FLOATS {
            for code in 0..small.largest_code() {
                let (below, above) = (small.decode(code), small.decode(code + 1));
                let middle = f32::midpoint(below, above);
                let even = if code % 2 == 0 { code } else { code + 1 };
                let encode = |number: f32| small.encode(number, true, PowerRounding::Up);
                assert_eq!(encode(middle), even, "{} {middle}", small.name());
                assert_eq!(encode(middle.next_up()), code + 1);
                assert_eq!(encode(middle.next_down()), code);
            }
        }
    }

    #[test]
    fn numbers_beyond_the_range() {
        let encode = |small: SmallType, number: f32, saturates: bool| {
            small.encode(number, saturates, PowerRounding::Up)
        };
        assert_eq!(encode(SmallType::F8E4M3Fn, f32::INFINITY, true), 0x7E);
        assert_eq!(encode(SmallType::F8E4M3Fn, f32::INFINITY, false), 0x7F);
        assert_eq!(encode(SmallType::F8E4M3Fn, 464.0, false), 0x7E);
        assert_eq!(encode(SmallType::F8E4M3Fn, 465.0, false), 0x7F);
        assert_eq!(encode(SmallType::F8E5M2, -1e9, false), 0xFC);
        assert_eq!(encode(SmallType::F8E5M2, -1e9, true), 0xFB);
        assert_eq!(encode(SmallType::F8E4M3FnUz, -1e9, false), 0x80);
        assert_eq!(encode(SmallType::F8E4M3FnUz, -1e-9, false), 0);
        assert_eq!(encode(SmallType::F4E2M1, -100.0, true), 0xF);
        for (rounding, code) in
            [(PowerRounding::Up, 128), (PowerRounding::Down, 127), (PowerRounding::Nearest, 127)]
        {
            assert_eq!(SmallType::F8E8M0.encode(1.25, true, rounding), code);
        }
    }
}
