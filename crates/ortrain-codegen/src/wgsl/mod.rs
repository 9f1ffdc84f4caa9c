//! WGSL.

use std::fmt::Write;
use std::sync::LazyLock;

use ortrain_expr::Scalar;

use crate::dialect::{DeclaredBinding, Dialect, GROUP_SIZE, SharedArray};
use crate::functions::functions;
use crate::launch::KernelSource;
use crate::library::{Library, split_functions};
use crate::repr::Repr;

/// Shading language of WebGPU. No optional features are used: no 64-bit types, no subgroups, no narrow floats.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wgsl;

/// Functions for 64-bit integers, for floats, and the elementary functions. Other languages get them by translation.
pub(crate) fn shared_functions() -> Vec<(String, String)> {
    let texts = [include_str!("integers.wgsl"), include_str!("floats.wgsl"), &functions()];
    texts.into_iter().flat_map(|text| split_functions(text, "fn ")).collect()
}

static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    let doubles = split_functions(include_str!("doubles.wgsl"), "fn ");
    Library::new(shared_functions().into_iter().chain(doubles).collect())
});

impl Dialect for Wgsl {
    fn has_float64(&self) -> bool {
        false
    }

    fn type_name(&self, repr: Repr) -> &'static str {
        match repr {
            Repr::F32 => "f32",
            Repr::I32 => "i32",
            Repr::U32 => "u32",
            Repr::Bool => "bool",
            Repr::I64 | Repr::U64 | Repr::F64 => "vec2<u32>",
            Repr::F32x2 => "vec2<f32>",
            Repr::F32x4 => "vec4<f32>",
        }
    }

    fn constant(&self, value: Scalar, repr: Repr) -> String {
        let bits = value.bits();
        match repr {
            // WGSL has no literals for infinities, and implementations may flush subnormal literals.
            Repr::F32 => match f32::from_bits(bits as u32) {
                v if v.is_normal() || bits as u32 == 0 => format!("{v:?}f"),
                _ => format!("float_of({}u)", bits as u32),
            },
            Repr::I32 if bits as i32 == i32::MIN => "int_of(2147483648u)".to_owned(),
            Repr::I32 => format!("{}", bits as i32),
            Repr::U32 => format!("{}u", bits as u32),
            Repr::Bool => if bits == 0 { "false" } else { "true" }.to_owned(),
            Repr::I64 | Repr::U64 | Repr::F64 => {
                let [low, high] = [bits as u32, (bits >> 32) as u32].map(|word| format!("{word}u"));
                self.two_words(repr, &low, &high)
            }
            Repr::F32x2 | Repr::F32x4 => self.floats(repr, &[self.constant(value, Repr::F32)]),
        }
    }

    fn two_words(&self, _: Repr, low: &str, high: &str) -> String {
        format!("pair({low}, {high})")
    }

    fn floats(&self, repr: Repr, parts: &[String]) -> String {
        format!("{}({})", self.type_name(repr), parts.join(", "))
    }

    fn component(&self, array: &str, at: &str, part: &str) -> String {
        format!("{array}[{at}][{part}]")
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

    fn loop_head(&self, name: &str, from: &str, to: &str) -> String {
        format!("for (var {name}: i32 = {from}; {name} < {to}; {name}++) {{")
    }

    fn word(&self, binding: &DeclaredBinding, at: &str) -> String {
        let name = &binding.name;
        if binding.atomic { format!("atomicLoad(&{name}[{at}])") } else { format!("{name}[{at}]") }
    }

    fn quad(&self, binding: &DeclaredBinding, at: &str) -> String {
        format!("{}[{at}]", binding.name)
    }

    fn define_quad(&self, name: &str, value: &str) -> String {
        format!("let {name}: vec4<u32> = {value};")
    }

    fn set_quad(&self, binding: &DeclaredBinding, at: &str, words: &[String; 4]) -> String {
        format!("{}[{at}] = vec4<u32>({});", binding.name, words.join(", "))
    }

    fn set_word(&self, binding: &DeclaredBinding, at: &str, value: &str) -> String {
        let name = &binding.name;
        if binding.atomic {
            format!("atomicStore(&{name}[{at}], {value});")
        } else {
            format!("{name}[{at}] = {value};")
        }
    }

    fn set_bits(&self, binding: &DeclaredBinding, at: &str, mask: &str, value: &str) -> String {
        let name = &binding.name;
        format!("atomicAnd(&{name}[{at}], ~({mask})); atomicOr(&{name}[{at}], ({value}) & ({mask}));")
    }

    fn min_word(&self, binding: &DeclaredBinding, at: &str, value: &str) -> String {
        format!("atomicMin(&{}[{at}], {value});", binding.name)
    }

    fn barrier(&self) -> String {
        "workgroupBarrier();".to_owned()
    }

    fn binding_barrier(&self) -> String {
        "storageBarrier();".to_owned()
    }

    fn library(&self, kernels: &[&KernelSource]) -> String {
        LIBRARY.needed_by(kernels.iter().map(|kernel| &*kernel.text)).concat()
    }

    fn kernel(&self, name: &str, bindings: &[DeclaredBinding], body: &str, points: u64, row: u32) -> String {
        let mut text = binding_declarations(bindings);
        let _ = write!(
            text,
            "@compute @workgroup_size({GROUP_SIZE})
fn {name}(@builtin(global_invocation_id) invocation: vec3<u32>) {{
let id: u32 = invocation.x + invocation.y * {}u;
if (id >= {points}u) {{ return; }}
{body}}}
",
            u64::from(row) * u64::from(GROUP_SIZE)
        );
        text
    }

    fn kernel_of_groups(
        &self,
        name: &str,
        bindings: &[DeclaredBinding],
        shared: &[SharedArray],
        body: &str,
        groups: u64,
        row: u32,
    ) -> String {
        let mut text = binding_declarations(bindings);
        for SharedArray { name, repr, len } in shared {
            let _ = writeln!(text, "var<workgroup> {name}: array<{}, {len}>;", self.type_name(*repr));
        }
        // Control flow must be uniform in a group: the last row of groups exits in whole groups.
        let _ = write!(
            text,
            "@compute @workgroup_size({GROUP_SIZE})
fn {name}(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_index) invocation: u32) {{
let group: u32 = place.x + place.y * {row}u;
let lane: i32 = i32(invocation);
if (group >= {groups}u) {{ return; }}
{body}}}
"
        );
        text
    }
}

/// Returns the declarations of bindings.
fn binding_declarations(bindings: &[DeclaredBinding]) -> String {
    let mut text = String::new();
    for (k, DeclaredBinding { name, atomic, is_wide }) in bindings.iter().enumerate() {
        let word = match (atomic, is_wide) {
            (true, _) => "atomic<u32>",
            (_, true) => "vec4<u32>",
            _ => "u32",
        };
        let _ = writeln!(text, "@group(0) @binding({k}) var<storage, read_write> {name}: array<{word}>;");
    }
    text
}
