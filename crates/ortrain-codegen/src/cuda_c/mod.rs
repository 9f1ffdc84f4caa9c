//! CUDA C.

mod translate;

use std::fmt::Write;
use std::sync::LazyLock;

use ortrain_expr::Scalar;
use rustc_hash::FxHashSet;

use crate::dialect::{DeclaredBinding, Dialect, GROUP_SIZE, SharedArray};
use crate::launch::{Caps, KernelSource};
use crate::library::{Library, called_names, split_functions};
use crate::repr::Repr;
use crate::wgsl::shared_functions;
use translate::translate;

/// Language of NVIDIA's compiler NVRTC. Integers and floats of 64 bits are native.
///
/// A kernel is an `extern "C"` function with one pointer per binding. Groups are blocks of [`GROUP_SIZE`] threads in a
/// grid of two dimensions.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaC;

impl CudaC {
    /// Limits of kernels. Indices of words are 32-bit signed integers.
    pub const CAPS: Caps =
        Caps { binding_bytes: 4 * ((1 << 31) - 1), bindings: 64, groups: 65_535, has_late_faults: true };
}

/// Types and operators that precede every library.
const VECTORS: &str = include_str!("vectors.cuh");

/// Native functions, and translations of the functions of WGSL without a native version. Functions of pairs of words
/// remain if a translated function calls them.
static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    let native = split_functions(include_str!("native.cuh"), "DEVICE ");
    let shared = shared_functions();
    let native_names: FxHashSet<&str> = native.iter().map(|(name, _)| name.as_str()).collect();
    let mut kept: FxHashSet<&str> =
        shared.iter().map(|(name, _)| name.as_str()).filter(|name| !native_names.contains(name)).collect();
    // Its native version calls the translated one.
    kept.insert("random_bits");
    let mut count = 0;
    while count < kept.len() {
        count = kept.len();
        let bodies = shared.iter().filter(|(name, _)| kept.contains(name.as_str())).map(|(_, text)| text);
        let called: FxHashSet<&str> = bodies.flat_map(|text| called_names(text)).collect();
        kept.extend(called);
    }
    // Scalars have one version.
    let is_pair = |text: &str| text.split(')').next().is_some_and(|head| head.contains("vec2<u32>"));
    let is_kept = |(name, text): &&(String, String)| {
        kept.contains(name.as_str()) && (!native_names.contains(name.as_str()) || is_pair(text))
    };
    let translated = shared.iter().filter(is_kept).map(|(name, text)| (name.clone(), translate(text)));
    Library::new(translated.chain(native.iter().cloned()).collect())
});

impl Dialect for CudaC {
    fn has_float64(&self) -> bool {
        true
    }

    fn type_name(&self, repr: Repr) -> &'static str {
        match repr {
            Repr::F32 => "float",
            Repr::I32 => "int",
            Repr::U32 => "unsigned",
            Repr::Bool => "bool",
            Repr::I64 | Repr::U64 => "word2",
            Repr::F64 => "double",
            Repr::F32x2 => "float2",
            Repr::F32x4 => "float4",
        }
    }

    fn constant(&self, value: Scalar, repr: Repr) -> String {
        let bits = value.bits();
        match repr {
            Repr::F32 => match f32::from_bits(bits as u32) {
                v if v.is_normal() || bits as u32 == 0 => format!("{v:?}f"),
                _ => format!("float_of({}u)", bits as u32),
            },
            Repr::F64 => match f64::from_bits(bits) {
                v if v.is_normal() || bits == 0 => format!("{v:?}"),
                _ => self.two_words(repr, &format!("{}u", bits as u32), &format!("{}u", bits >> 32)),
            },
            Repr::I32 if bits as i32 == i32::MIN => "int_of(2147483648u)".to_owned(),
            Repr::I32 => format!("{}", bits as i32),
            Repr::U32 => format!("{}u", bits as u32),
            Repr::Bool => if bits == 0 { "false" } else { "true" }.to_owned(),
            Repr::I64 | Repr::U64 => format!("{bits}ull"),
            Repr::F32x2 | Repr::F32x4 => self.floats(repr, &[self.constant(value, Repr::F32)]),
        }
    }

    fn two_words(&self, repr: Repr, low: &str, high: &str) -> String {
        let name = if repr == Repr::F64 { "double_of" } else { "pair" };
        format!("{name}({low}, {high})")
    }

    fn floats(&self, repr: Repr, parts: &[String]) -> String {
        let count = if repr == Repr::F32x2 { 2 } else { 4 };
        let parts = match parts {
            [part] => vec![part.clone(); count],
            parts => parts.to_vec(),
        };
        format!("make_{}({})", self.type_name(repr), parts.join(", "))
    }

    fn component(&self, array: &str, at: &str, part: &str) -> String {
        format!("(&{array}[{at}].x)[{part}]")
    }

    fn define(&self, name: &str, repr: Repr, value: &str) -> String {
        format!("const {} {name} = {value};", self.type_name(repr))
    }

    fn variable(&self, name: &str, repr: Repr, value: &str) -> String {
        format!("{} {name} = {value};", self.type_name(repr))
    }

    fn select(&self, condition: &str, yes: &str, no: &str) -> String {
        format!("({condition} ? {yes} : {no})")
    }

    fn loop_head(&self, name: &str, from: &str, to: &str) -> String {
        format!("for (int {name} = {from}; {name} < {to}; {name}++) {{")
    }

    fn word(&self, binding: &DeclaredBinding, at: &str) -> String {
        let name = &binding.name;
        if binding.atomic { format!("((volatile unsigned*){name})[{at}]") } else { format!("{name}[{at}]") }
    }

    fn quad(&self, binding: &DeclaredBinding, at: &str) -> String {
        format!("{}[{at}]", binding.name)
    }

    fn define_quad(&self, name: &str, value: &str) -> String {
        format!("const uint4 {name} = {value};")
    }

    fn set_quad(&self, binding: &DeclaredBinding, at: &str, words: &[String; 4]) -> String {
        format!("{}[{at}] = make_uint4({});", binding.name, words.join(", "))
    }

    fn set_word(&self, binding: &DeclaredBinding, at: &str, value: &str) -> String {
        format!("{} = {value};", self.word(binding, at))
    }

    fn set_bits(&self, binding: &DeclaredBinding, at: &str, mask: &str, value: &str) -> String {
        let name = &binding.name;
        format!("atomicAnd(&{name}[{at}], ~({mask})); atomicOr(&{name}[{at}], ({value}) & ({mask}));")
    }

    fn min_word(&self, binding: &DeclaredBinding, at: &str, value: &str) -> String {
        format!("atomicMin(&{}[{at}], {value});", binding.name)
    }

    fn barrier(&self) -> String {
        "__syncthreads();".to_owned()
    }

    fn binding_barrier(&self) -> String {
        "__syncthreads();".to_owned()
    }

    fn library(&self, kernels: &[&KernelSource]) -> String {
        let functions = LIBRARY.needed_by(kernels.iter().map(|kernel| &*kernel.text));
        let heads = functions.iter().filter_map(|text| text.split(" {").next());
        let heads: String = heads.map(|head| format!("{head};\n")).collect();
        [VECTORS, &heads, &functions.concat()].concat()
    }

    fn kernel(&self, name: &str, bindings: &[DeclaredBinding], body: &str, points: u64, row: u32) -> String {
        let mut text = kernel_head(name, bindings, &GROUP_SIZE.to_string());
        let _ = write!(
            text,
            "const unsigned id = blockIdx.x * {GROUP_SIZE}u + threadIdx.x + blockIdx.y * {}u;
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
        // At least two blocks per multiprocessor: threads then have at most 128 registers. Without a number, the
        // compiler spills registers to run more blocks.
        let mut text = kernel_head(name, bindings, &format!("{GROUP_SIZE}, 2"));
        for SharedArray { name, repr, len } in shared {
            let _ = writeln!(text, "__shared__ {} {name}[{len}];", self.type_name(*repr));
        }
        let _ = write!(
            text,
            "const unsigned group = blockIdx.x + blockIdx.y * {row}u;
const int lane = (int)threadIdx.x;
if (group >= {groups}u) {{ return; }}
{body}}}
"
        );
        text
    }
}

/// Returns the head of a kernel, with its bindings as parameters and its launch bounds. The bindings of a launch are
/// disjoint.
fn kernel_head(name: &str, bindings: &[DeclaredBinding], launch_bounds: &str) -> String {
    let parameter = |binding: &DeclaredBinding| {
        let word = if binding.is_wide { "uint4" } else { "unsigned" };
        format!("{word}* __restrict__ {}", binding.name)
    };
    let parameters: Vec<String> = bindings.iter().map(parameter).collect();
    format!(
        "extern \"C\" __global__ void __launch_bounds__({launch_bounds}) {name}({}) {{\n",
        parameters.join(", ")
    )
}
