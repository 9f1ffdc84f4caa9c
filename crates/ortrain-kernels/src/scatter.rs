//! Adding into the places that indices name: the gradient of a gather.

use ortrain_expr::DType;

use crate::isa::{Isa, Level, Work};
use crate::pool::Pool;
use crate::tape::number::{Brain, Half, Number, Stored};
use crate::views::Bases;

/// `out[o, index[j], i] += src[o, j, i]` for all o, j, i: contiguous buffers of shapes `[outer, size, inner]`,
/// `[count]` and `[outer, count, inner]`.
///
/// A negative index counts from the end; one that is still out of range adds nothing. An element is added to in the
/// order of j, each sum rounded to the type of the buffer (`F16` and `BF16` are added as `F32`).
#[derive(Clone, Copy, Debug)]
pub struct ScatterDesc {
    /// Product of the axes before the indexed one.
    pub outer: usize,
    /// Size of the indexed axis.
    pub size: usize,
    /// Number of indices.
    pub count: usize,
    /// Product of the axes after the indexed one.
    pub inner: usize,
    /// Type of `out` and `src`: a float, `I32` or `I64`.
    pub dtype: DType,
    /// Type of the indices: `I32` or `I64`.
    pub index: DType,
}

/// A compiled [`ScatterDesc`].
#[derive(Clone, Copy, Debug)]
pub struct ScatterKernel {
    desc: ScatterDesc,
    isa: Isa,
    /// Elements of the inner axes that belong to one task.
    width: usize,
}

/// Elements of a task, about.
const GRAIN: usize = 32 * 1024;
/// Fewest adjacent elements of a task: less would be all reading of indices.
const NARROW: usize = 64;

impl ScatterKernel {
    /// Compiles a scatter.
    ///
    /// # Errors
    /// When it is not defined for the types, or a buffer is too large to count.
    pub fn new(desc: ScatterDesc, isa: Isa) -> Result<ScatterKernel, String> {
        if !matches!(desc.dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16 | DType::I32 | DType::I64)
        {
            return Err(format!("adding {}", desc.dtype));
        }
        if !matches!(desc.index, DType::I32 | DType::I64) {
            return Err(format!("indices of type {}", desc.index));
        }
        let elements = |axis: usize| desc.outer.checked_mul(axis)?.checked_mul(desc.inner)?.checked_mul(8);
        if elements(desc.size).is_none() || elements(desc.count).is_none() {
            return Err("a buffer too large to count".to_owned());
        }
        let width = (GRAIN / desc.count.max(1)).max(NARROW).next_multiple_of(NARROW).min(desc.inner.max(1));
        Ok(ScatterKernel { desc, isa, width })
    }

    /// Adds. Allocates nothing, needs no scratch memory, and gives the same bits on any number of threads.
    ///
    /// # Safety
    /// The pointers are the starts of buffers of the description's shapes and types, valid for reads, and `out` for
    /// writes, until the run is over; any alignment will do. `out` overlaps neither of the others, and nobody else
    /// touches it; nobody writes the others.
    pub unsafe fn run(&self, out: *mut u8, indices: *const u8, src: *const u8, pool: &Pool) {
        let ScatterDesc { outer, size, count, inner, dtype, index } = self.desc;
        if outer * size * inner == 0 || count == 0 {
            return;
        }
        let parts = inner.div_ceil(self.width);
        let pointers = [out, indices.cast_mut(), src.cast_mut()];
        let bases = Bases(&pointers);
        pool.run(outer * parts, usize::MAX, &|task, _| {
            let (o, part) = (task / parts, task % parts);
            let [out, indices, src] = *{ bases }.0 else { unreachable!("three buffers") };
            let first = part * self.width;
            let width = self.width.min(inner - first);
            let at =
                |base: *mut u8, lines: usize| base.wrapping_add((o * lines * inner + first) * dtype.size());
            macro_rules! go {
                ($s:ty, $i:ty) => {
                    self.isa.run(Add::<$s, $i> {
                        out: at(out, size).cast(),
                        indices: indices.cast_const().cast(),
                        src: at(src, count).cast_const().cast(),
                        size,
                        count,
                        width,
                        step: inner,
                    })
                };
            }
            macro_rules! by_index {
                ($s:ty) => {
                    if index == DType::I32 { go!($s, i32) } else { go!($s, i64) }
                };
            }
            match dtype {
                DType::F32 => by_index!(f32),
                DType::F64 => by_index!(f64),
                DType::F16 => by_index!(Half),
                DType::BF16 => by_index!(Brain),
                DType::I32 => by_index!(i32),
                DType::I64 => by_index!(i64),
                other => unreachable!("adding {other}: checked when compiled"),
            }
        });
    }
}

/// A column of the buffers: `width` elements of each line.
struct Add<S, I> {
    out: *mut S,
    indices: *const I,
    src: *const S,
    size: usize,
    count: usize,
    width: usize,
    step: usize,
}

impl<S: Stored<Computed: Number>, I: Copy + Into<i64>> Work for Add<S, I> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for j in 0..self.count {
            // SAFETY: by the contract of `ScatterKernel::run` there are `count` indices.
            let index: i64 = unsafe { self.indices.add(j).read_unaligned() }.into();
            let index = if index < 0 { index.wrapping_add(self.size as i64) } else { index };
            if index < 0 || index >= self.size as i64 {
                continue;
            }
            // SAFETY: both lines lie in their buffers, and nobody else writes this part of `out`.
            unsafe {
                let out = self.out.add(index as usize * self.step);
                let src = self.src.add(j * self.step);
                for i in 0..self.width {
                    let sum = out.add(i).read_unaligned().decode().plus(src.add(i).read_unaligned().decode());
                    out.add(i).write_unaligned(S::encode(sum));
                }
            }
        }
    }
}
