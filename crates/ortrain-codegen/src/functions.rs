//! Elementary functions in WGSL, with the coefficients of the CPU's vector code.
//!
//! Some drivers implement `fma` with two roundings, fuse products and sums, or reverse comparisons with NaN. Exact
//! parts are therefore exact in either case: numbers are split by their bits, and NaN is detected by its bits.

use std::fmt::{self, Display, Formatter, Write};

use ortrain_expr::coefficients::{ATAN, COSINE, EXP2, LOG2, SINE, SQRT_HALF_BITS};
use ortrain_expr::elementary::{self, Machine};

/// Formats a number as a literal of WGSL and of C.
fn format_float(value: f32) -> String {
    format!("{value:?}f")
}

/// Prints a polynomial in `x`, with the coefficient of the highest power first.
fn polynomial(x: &str, coefficients: &[f32]) -> String {
    let mut text = format_float(coefficients[0]);
    for &c in &coefficients[1..] {
        text = format!("({text} * {x} + {})", format_float(c));
    }
    text
}

/// Prints a polynomial with coefficients of 64 bits, rounded to 32 bits.
fn rounded_polynomial(x: &str, coefficients: &[f64]) -> String {
    polynomial(x, &coefficients.iter().map(|&c| c as f32).collect::<Vec<_>>())
}

/// Returns the source of all functions.
pub(crate) fn functions() -> String {
    let mut text = String::new();
    for part in [elementary_functions(), circular(), inverse_tangent(), power()] {
        let _ = writeln!(text, "{part}");
    }
    text
}

/// Number in the text of a function: a constant, or the name `vN` of a line.
#[derive(Clone, Copy)]
enum Term {
    Argument,
    Constant(f32),
    Line(usize),
}

/// Lines of a function, as a machine of elementary functions.
#[derive(Default)]
struct Lines {
    text: String,
    count: usize,
}

impl Lines {
    /// Adds a line that defines a value.
    fn define(&mut self, value: &str) -> Term {
        let _ = writeln!(self.text, "    let v{} = {value};", self.count);
        self.count += 1;
        Term::Line(self.count - 1)
    }
}

impl Display for Term {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match *self {
            Term::Argument => f.write_str("x"),
            Term::Line(line) => write!(f, "v{line}"),
            Term::Constant(value) if value.is_finite() => f.write_str(&format_float(value)),
            Term::Constant(value) => write!(f, "float_of({:#x}u)", value.to_bits()),
        }
    }
}

impl Machine for Lines {
    type Number = Term;
    type Truth = Term;
    type Rounded = Term;

    fn number(&mut self, value: f32) -> Term {
        Term::Constant(value)
    }

    fn add(&mut self, a: Term, b: Term) -> Term {
        self.define(&format!("{a} + {b}"))
    }

    fn sub(&mut self, a: Term, b: Term) -> Term {
        self.define(&format!("{a} - {b}"))
    }

    fn mul(&mut self, a: Term, b: Term) -> Term {
        self.define(&format!("{a} * {b}"))
    }

    fn div(&mut self, a: Term, b: Term) -> Term {
        self.define(&format!("{a} / {b}"))
    }

    fn mul_add(&mut self, a: Term, b: Term, c: Term) -> Term {
        self.define(&format!("{a} * {b} + {c}"))
    }

    fn negative(&mut self, a: Term) -> Term {
        self.define(&format!("-{a}"))
    }

    fn magnitude(&mut self, a: Term) -> Term {
        self.define(&format!("abs_f32({a})"))
    }

    fn with_sign(&mut self, a: Term, sign: Term) -> Term {
        self.define(&format!("with_sign({a}, {sign})"))
    }

    fn clamp_max(&mut self, a: Term, bound: f32) -> Term {
        self.define(&format!("min({a}, {})", format_float(bound)))
    }

    fn clamp_min(&mut self, a: Term, bound: f32) -> Term {
        self.define(&format!("max({a}, {})", format_float(bound)))
    }

    /// Some drivers compute wrong infinities.
    fn without_overflow(&mut self, a: Term, bound: f32) -> Term {
        self.clamp_max(a, bound)
    }

    fn is_less(&mut self, a: Term, bound: f32) -> Term {
        self.define(&format!("{a} < {}", format_float(bound)))
    }

    fn is_zero(&mut self, a: Term) -> Term {
        self.define(&format!("(bitcast<u32>({a}) & 0x7fffffffu) == 0u"))
    }

    fn is_nonnegative(&mut self, a: Term) -> Term {
        self.define(&format!("bitcast<u32>({a}) <= 0x7f800000u || bitcast<u32>({a}) == 0x80000000u"))
    }

    fn is_positive_infinity(&mut self, a: Term) -> Term {
        self.define(&format!("bitcast<u32>({a}) == 0x7f800000u"))
    }

    fn is_nan(&mut self, a: Term) -> Term {
        self.define(&format!("is_nan({a})"))
    }

    fn choose(&mut self, truth: Term, yes: Term, no: Term) -> Term {
        self.define(&format!("select({no}, {yes}, {truth})"))
    }

    fn round_product(&mut self, a: Term, factor: f32) -> Term {
        self.define(&format!("floor({a} * {} + 0.5f)", format_float(factor)))
    }

    fn integer(&mut self, a: Term) -> Term {
        a
    }

    fn scale(&mut self, a: Term, power: Term) -> Term {
        self.define(&format!("scale_f32({a}, i32({power}))"))
    }

    fn split(&mut self, a: Term) -> (Term, Term) {
        let mantissa = self.define(&format!("mantissa_of({a})"));
        (mantissa, self.define(&format!("f32(exponent_of({a}))")))
    }

    fn exponential(&mut self, a: Term) -> Term {
        self.define(&format!("exp_f32({a})"))
    }
}

/// Elementary function of one number.
type Elementary = fn(&mut Lines, Term) -> Term;

/// Prints an elementary function. It returns NaN unchanged.
fn elementary_function(name: &str, compute: Elementary) -> String {
    let mut lines = Lines::default();
    let result = compute(&mut lines, Term::Argument);
    let text = lines.text;
    format!(
        "fn {name}(x: f32) -> f32 {{\n    if (is_nan(x)) {{ return x; }}\n{text}    return {result};\n}}\n"
    )
}

fn elementary_functions() -> String {
    let sqrt_half = SQRT_HALF_BITS;
    let parts = format!(
        "fn exp2_int(n: i32) -> f32 {{ return bitcast<f32>(bitcast<u32>(n + 127) << 23u); }}
fn scale_f32(x: f32, n: i32) -> f32 {{
    // Two multiplications: n is between -252 and 254, beyond the exponents of a number, and results are rounded once.
    let half = n >> 1u;
    return x * exp2_int(half) * exp2_int(n - half);
}}
fn normal_bits(x: f32) -> vec2<u32> {{
    // Returns the bits of x * 2^n as a normal number, and the exponent n: 24 for a subnormal x, otherwise 0.
    // Integer arithmetic, because drivers can flush subnormal floats to zero.
    let bits = bitcast<u32>(x);
    let shift = countLeadingZeros(bits) - 8u;
    let moved = (bits << shift) + ((24u - shift) << 23u);
    return select(vec2<u32>(bits, 0u), vec2<u32>(moved, 24u), bits < 0x800000u);
}}
fn mantissa_of(x: f32) -> f32 {{
    let bits = normal_bits(x).x;
    return bitcast<f32>(((bits - {sqrt_half}u) & 0x7fffffu) + {sqrt_half}u);
}}
fn exponent_of(x: f32) -> i32 {{
    let normal = normal_bits(x);
    return (bitcast<i32>(normal.x - {sqrt_half}u) >> 23u) - bitcast<i32>(normal.y);
}}
"
    );
    let functions: [(&str, Elementary); 5] = [
        ("exp_f32", elementary::exp),
        ("log_f32", elementary::log),
        ("tanh_f32", elementary::tanh),
        ("sigmoid_f32", elementary::sigmoid),
        ("erf_f32", elementary::erf),
    ];
    functions.into_iter().fold(parts, |text, (name, compute)| text + &elementary_function(name, compute))
}

/// Returns parts of pi / 2 with few bits: products with integers of 13 bits are exact.
fn half_pi_parts() -> [f32; 4] {
    let mut rest = std::f64::consts::FRAC_PI_2;
    [0, 1, 2, 3].map(|_| {
        let part = f32::from_bits((rest as f32).to_bits() & 0xffff_e000);
        rest -= f64::from(part);
        part
    })
}

fn circular() -> String {
    let [a, b, c, d] = half_pi_parts().map(format_float);
    let (sine, cosine) = (rounded_polynomial("z", &SINE), rounded_polynomial("z", &COSINE));
    format!(
        "fn quadrant(rest: f32, n: u32) -> f32 {{
    let z = rest * rest;
    let sine = rest + rest * (z * {sine});
    let cosine = 1.0f + z * {cosine};
    let result = select(cosine, sine, (n & 1u) == 0u);
    return bitcast<f32>(bitcast<u32>(result) ^ ((n & 2u) << 30u));
}}
fn turns_word(k: u32) -> u32 {{
    // The binary digits of 2 / pi, 32 at a time, behind two words of zeros.
    switch (k) {{
        case 2u: {{ return 0xa2f9836eu; }}
        case 3u: {{ return 0x4e441529u; }}
        case 4u: {{ return 0xfc2757d1u; }}
        case 5u: {{ return 0xf534ddc0u; }}
        case 6u: {{ return 0xdb629599u; }}
        case 7u: {{ return 0x3c439041u; }}
        case 8u: {{ return 0xfe5163abu; }}
        default: {{ return 0u; }}
    }}
}}
fn turns_bits(first: u32) -> u32 {{
    let shift = first & 31u;
    let word = turns_word(first >> 5u);
    if (shift == 0u) {{ return word; }}
    return (word << shift) | (turns_word((first >> 5u) + 1u) >> (32u - shift));
}}
fn circular_large(x: f32, quarters: u32) -> f32 {{
    // Of the product of the mantissa and 2 / pi the bits that matter modulo 4: 2 before and 94 behind the point.
    let bits = bitcast<u32>(x) & 0x7fffffffu;
    let mantissa = (bits & 0x7fffffu) | 0x800000u;
    let first = (bits >> 23u) - 88u;
    let low_part = mul_words(mantissa, turns_bits(first + 64u));
    let middle = mul_words(mantissa, turns_bits(first + 32u));
    let sum = middle.x + low_part.y;
    let top = mantissa * turns_bits(first) + middle.y + select(0u, 1u, sum < middle.x);
    var n = top >> 30u;
    var fraction = vec3<u32>(low_part.x, sum, top << 2u);
    fraction = vec3<u32>(fraction.x << 2u, (fraction.y << 2u) | (fraction.x >> 30u), fraction.z | (sum >> 30u));
    let negative = (fraction.z >> 31u) != 0u;
    var part = vec2<u32>(fraction.y, fraction.z);
    if (negative) {{
        n += 1u;
        part = neg_pair(part);
    }}
    let size = f32_of_u64(part) * 5.421010862427522e-20f * 1.5707964f;
    let rest = select(size, -size, negative);
    if (bitcast<u32>(x) >> 31u != 0u) {{
        // sin(-y + q pi/2): the sine changes its sign, the cosine does not.
        let result = quadrant(rest, n + quarters);
        return select(-result, result, quarters == 1u);
    }}
    return quadrant(rest, n + quarters);
}}
fn circular(x: f32, quarters: u32) -> f32 {{
    let bits = bitcast<u32>(x) & 0x7fffffffu;
    if (bits >= 0x7f800000u) {{ return float_of(0x7fc00000u); }}
    if (bits >= 0x45000000u) {{ return circular_large(x, quarters); }}
    let n = floor(x * 0.63661975f + 0.5f);
    let rest = (((x - n * {a}) - n * {b}) - n * {c}) - n * {d};
    return quadrant(rest, bitcast<u32>(i32(n)) + quarters);
}}
fn sin_f32(x: f32) -> f32 {{
    if (!is_not_zero(x)) {{ return x; }}
    return circular(x, 0u);
}}
fn cos_f32(x: f32) -> f32 {{ return circular(x, 1u); }}"
    )
}

fn inverse_tangent() -> String {
    let p = rounded_polynomial("z", &ATAN);
    format!(
        "fn atan_f32(x: f32) -> f32 {{
    if (is_nan(x)) {{ return x; }}
    let t = abs_f32(x);
    var rest = t;
    var base = 0.0f;
    var base_low = 0.0f;
    if (t > 2.4142135f) {{
        rest = select(-1.0f / t, 0.0f, t > 1e20f);
        base = 1.5707964f;
        base_low = -4.371139e-8f;
    }} else if (t > 0.41421357f) {{
        rest = (t - 1.0f) / (t + 1.0f);
        base = 0.7853982f;
        base_low = -2.1855695e-8f;
    }}
    let z = rest * rest;
    return with_sign(base + ((rest * z * {p} + base_low) + rest), x);
}}"
    )
}

fn power() -> String {
    let lead = LOG2[5];
    let lead_high = f32::from_bits((lead as f32).to_bits() & 0xffff_f000);
    let lead_low = format_float((lead - f64::from(lead_high)) as f32);
    let lead_high = format_float(lead_high);
    let rest = rounded_polynomial("z", &LOG2[..5]);
    let exp2 = rounded_polynomial("f", &EXP2);
    format!(
        "fn upper(x: f32) -> f32 {{ return bitcast<f32>(bitcast<u32>(x) & 0xfffff000u); }}
fn pow_f32(x: f32, y: f32) -> f32 {{
    if (!is_not_zero(y) || bitcast<u32>(x) == 0x3f800000u) {{ return 1.0f; }}
    if (is_nan(x) || is_nan(y)) {{ return float_of(0x7fc00000u); }}
    let magnitude = abs_f32(x);
    let size = abs_f32(y);
    let infinity = float_of(0x7f800000u);
    let negative = (bitcast<u32>(x) >> 31u) != 0u;
    let whole = size >= 16777216.0f || (size >= 1.0f && floor(y) == y);
    let odd = whole && size < 16777216.0f && (i32(clamp(y, -16777216.0f, 16777216.0f)) & 1) != 0;
    var result = 1.0f;
    let bits = bitcast<u32>(magnitude);
    if (bits == 0u || bits == 0x7f800000u || bitcast<u32>(size) == 0x7f800000u) {{
        result = select(0.0f, infinity, (magnitude > 1.0f) == (y > 0.0f));
        if (bits == 0x3f800000u) {{ result = 1.0f; }}
    }} else {{
        result = positive_pow(magnitude, y);
        if (negative && !whole) {{ return float_of(0x7fc00000u); }}
    }}
    return select(result, -result, negative && odd);
}}
fn positive_pow(x: f32, y: f32) -> f32 {{
    // The binary logarithm in two parts, the first of 12 bits: products of first parts are exact.
    let m = mantissa_of(x);
    let k = f32(exponent_of(x));
    let under = m + 1.0f;
    let s = (m - 1.0f) / under;
    let s_high = upper(s);
    let under_high = upper(under);
    let under_rest = (m - under_high) + 1.0f;
    let left = ((m - 1.0f) - s_high * under_high) - s_high * under_rest;
    let s_low = left / under;
    let z = s * s;
    let tail = s * z * {rest} + (s_low * {lead_high} + s * {lead_low});
    let lead = s_high * {lead_high};
    let start = k + lead;
    let log_high = upper(start);
    let log_low = ((k - log_high) + lead) + tail;
    let y_high = upper(y);
    let whole_part = y_high * log_high;
    let rest_part = y * log_low + (y - y_high) * log_high;
    if (whole_part > 400.0f || (whole_part + rest_part) > 200.0f) {{ return float_of(0x7f800000u); }}
    if (whole_part < -400.0f || (whole_part + rest_part) < -200.0f) {{ return 0.0f; }}
    let n = floor(whole_part + rest_part + 0.5f);
    let f = (whole_part - n) + rest_part;
    let p = 1.0f + f * {exp2};
    return scale_f32(p, i32(n));
}}"
    )
}
