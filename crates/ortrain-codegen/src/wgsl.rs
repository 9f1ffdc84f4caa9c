//! WGSL.

use std::fmt::Write;
use std::sync::LazyLock;

use ortrain_expr::Scalar;

use crate::dialect::{Declared, Dialect, GROUP, Repr, needed_items};
use crate::functions::functions;

/// The language of WebGPU. No optional feature is used: no 64-bit type, no subgroups, no narrow floats.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wgsl;

static PRELUDE: LazyLock<String> = LazyLock::new(|| {
    let texts = [
        include_str!("wgsl/integers.wgsl"),
        include_str!("wgsl/floats.wgsl"),
        include_str!("wgsl/doubles.wgsl"),
        &functions(),
    ];
    texts.iter().fold(String::from("\n"), |all, text| all + text + "\n")
});

impl Dialect for Wgsl {
    fn type_name(&self, repr: Repr) -> &'static str {
        match repr {
            Repr::F32 => "f32",
            Repr::I32 => "i32",
            Repr::U32 => "u32",
            Repr::Bool => "bool",
            Repr::I64 | Repr::U64 | Repr::F64 => "vec2<u32>",
        }
    }

    fn constant(&self, value: Scalar, repr: Repr) -> String {
        let bits = value.bits();
        match repr {
            // A literal can be no infinity, and need not be a subnormal number.
            Repr::F32 => match f32::from_bits(bits as u32) {
                v if v.is_normal() || bits as u32 == 0 => format!("{v:?}f"),
                _ => format!("float_of({}u)", bits as u32),
            },
            Repr::I32 if bits as i32 == i32::MIN => "int_of(2147483648u)".to_owned(),
            Repr::I32 => format!("{}i", bits as i32),
            Repr::U32 => format!("{}u", bits as u32),
            Repr::Bool => if bits == 0 { "false" } else { "true" }.to_owned(),
            Repr::I64 | Repr::U64 | Repr::F64 => format!("pair({}u, {}u)", bits as u32, (bits >> 32) as u32),
        }
    }

    fn define(&self, name: &str, repr: Repr, value: &str) -> String {
        format!("let {name}: {} = {value};", self.type_name(repr))
    }

    fn variable(&self, name: &str, repr: Repr, value: &str) -> String {
        format!("var {name}: {} = {value};", self.type_name(repr))
    }

    fn select(&self, condition: &str, yes: &str, no: &str) -> String {
        format!("select({no}, {yes}, {condition})")
    }

    fn counted(&self, name: &str, from: &str, to: &str) -> String {
        format!("for (var {name}: i32 = {from}; {name} < {to}; {name}++) {{")
    }

    fn word(&self, binding: &Declared, at: &str) -> String {
        let name = &binding.name;
        if binding.atomic { format!("atomicLoad(&{name}[{at}])") } else { format!("{name}[{at}]") }
    }

    fn set_word(&self, binding: &Declared, at: &str, value: &str) -> String {
        let name = &binding.name;
        if binding.atomic {
            format!("atomicStore(&{name}[{at}], {value});")
        } else {
            format!("{name}[{at}] = {value};")
        }
    }

    fn set_bits(&self, binding: &Declared, at: &str, mask: &str, value: &str) -> String {
        let name = &binding.name;
        format!("atomicAnd(&{name}[{at}], ~({mask})); atomicOr(&{name}[{at}], ({value}) & ({mask}));")
    }

    fn lower_word(&self, binding: &Declared, at: &str, value: &str) -> String {
        format!("atomicMin(&{}[{at}], {value});", binding.name)
    }

    fn prelude(&self) -> &str {
        &PRELUDE
    }

    fn kernel(&self, bindings: &[Declared], body: &str, points: u64, row: u32) -> String {
        let mut text = String::new();
        for (k, Declared { name, atomic }) in bindings.iter().enumerate() {
            let word = if *atomic { "atomic<u32>" } else { "u32" };
            let _ = writeln!(text, "@group(0) @binding({k}) var<storage, read_write> {name}: array<{word}>;");
        }
        text += &needed_items(self.prelude(), body);
        let _ = write!(
            text,
            "@compute @workgroup_size({GROUP})
fn main(@builtin(global_invocation_id) invocation: vec3<u32>) {{
let id: u32 = invocation.x + invocation.y * {}u;
if (id >= {points}u) {{ return; }}
{body}}}
",
            u64::from(row) * u64::from(GROUP)
        );
        text
    }
}
