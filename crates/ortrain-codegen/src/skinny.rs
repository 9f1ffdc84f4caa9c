//! Skinny matrix products, with few rows or few columns: the small factor has few lines, the large factor many.
//!
//! A line is a row of the left factor or a column of the right one. Several invocations share the terms of one line of
//! the large factor, and multiply them by all lines of the small factor.

use crate::context::Context;
use crate::dialect::GROUP_SIZE;
use crate::inner_product::{InnerProduct, LEFT, RIGHT, element_if, split_terms};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::repr::{Repr, Value};
use crate::split_k::{MatmulOutput, Split};
use crate::thread_index::define_coordinates;

const LANES: usize = GROUP_SIZE as usize;

/// Returns the launches of a product with few rows or few columns.
pub(crate) fn launches(cx: &Context<'_>, target: &MatmulOutput<'_>) -> Result<Vec<Launch>, String> {
    let factors = target.factors;
    let [m, n, k] = factors.sides();
    let small_side = if m <= n { LEFT } else { RIGHT };
    let large_side = LEFT + RIGHT - small_side;
    // Adjacent invocations load adjacent elements: terms of one line, or one term of adjacent lines.
    let along_terms = factors.runs_along_terms(large_side);
    let lines = if along_terms { 8 } else { 32 };
    let slices = LANES / lines;
    let groups = factors.batch().iter().product::<usize>() * [m, n][large_side].div_ceil(lines);
    let split = Split::for_sums(groups, k, slices);
    target.reserve(cx, split);
    let mut launches =
        vec![Printer { target, small_side, large_side, along_terms, lines, split }.launch(cx)?];
    if split.count > 1 {
        launches.push(target.add_parts_launch(cx, split)?);
    }
    Ok(launches)
}

struct Printer<'t> {
    target: &'t MatmulOutput<'t>,
    /// Side of the small factor: `LEFT` or `RIGHT`.
    small_side: usize,
    /// Side of the large factor.
    large_side: usize,
    /// True if adjacent invocations load terms of one line.
    along_terms: bool,
    /// Number of lines of the large factor per group. `slices` invocations share the terms of each line.
    lines: usize,
    split: Split,
}

/// Coordinates of a workgroup: its batch index, its part of the sums, and its first line of the large factor.
struct Group {
    batch: Vec<String>,
    part: String,
    first: String,
}

impl Printer<'_> {
    fn slices(&self) -> usize {
        LANES / self.lines
    }

    fn launch(&self, cx: &Context<'_>) -> Result<Launch, String> {
        let factors = self.target.factors;
        let batch = factors.batch();
        let grid = [self.split.count, factors.sides()[self.large_side].div_ceil(self.lines)];
        let dims: Vec<usize> = batch.iter().copied().chain(grid).collect();
        let mut kernel = cx.group_kernel();
        let mut at = define_coordinates(&mut kernel, "group", &dims);
        let position = at.split_off(batch.len());
        let first = kernel.int(format!("{} * {}", position[1], self.lines));
        let group = Group { batch: at, part: position[0].clone(), first };
        let sums = self.sums(&mut kernel, &group)?;
        self.store(&mut kernel, &group, &sums)?;
        cx.finish_groups(kernel, dims.iter().map(|&dim| dim as u64).product())
    }

    /// Returns the condition that a line of the large factor exists, if the last group has fewer lines.
    fn line_condition(&self, line: &str) -> Option<String> {
        let line_count = self.target.factors.sides()[self.large_side];
        (!line_count.is_multiple_of(self.lines)).then(|| format!("{line} < {line_count}"))
    }

    /// Prints the sums of an invocation: every `slices`-th term of one large line, for each line of the small factor.
    fn sums(&self, kernel: &mut Kernel<'_>, group: &Group) -> Result<Vec<InnerProduct>, String> {
        let (factors, slices) = (self.target.factors, self.slices());
        let fast = if self.along_terms { slices } else { self.lines };
        let (fast_index, outer_index) =
            (kernel.int(format!("lane % {fast}")), kernel.int(format!("lane / {fast}")));
        let (slice, line) =
            if self.along_terms { (fast_index, outer_index) } else { (outer_index, fast_index) };
        let line = kernel.int(format!("{} + {line}", group.first));
        let large_line = factors.define_line(kernel, self.large_side, &group.batch, &line);
        let sides = factors.sides();
        let others: Vec<Vec<String>> = (0..sides[self.small_side])
            .map(|k| factors.define_line(kernel, self.small_side, &group.batch, &k.to_string()))
            .collect();
        let precision = factors.precision();
        let sums: Vec<InnerProduct> = others.iter().map(|_| InnerProduct::new(kernel, precision)).collect();
        let open = kernel.depth();
        let Split { count, terms: part_terms } = self.split;
        let step = kernel.begin_loop("0", &(part_terms / slices).to_string());
        let term = format!("{} * {part_terms} + {step} * {slices} + {slice}", group.part);
        let term = kernel.int(term);
        let is_term = (count * part_terms != sides[2]).then(|| format!("{term} < {}", sides[2]));
        let conditions: Vec<String> = self.line_condition(&line).into_iter().chain(is_term).collect();
        if !conditions.is_empty() {
            kernel.begin_if(&conditions.join(" && "));
        }
        let [small_term, large_term] =
            [self.small_side, self.large_side].map(|side| factors.define_term(kernel, side, &term));
        let value = element_if(kernel, factors, self.large_side, None, [&large_line, &large_term])?;
        let value = split_terms(kernel, precision, value);
        for (line, sum) in others.iter().zip(&sums) {
            let other = element_if(kernel, factors, self.small_side, None, [line, &small_term])?;
            let other = split_terms(kernel, precision, other);
            match self.small_side {
                LEFT => sum.add_terms(kernel, &other, &value),
                _ => sum.add_terms(kernel, &value, &other),
            }
        }
        kernel.close_to(open);
        Ok(sums)
    }

    /// Adds the slices of each sum in order. The sum goes to the epilogue, or to scratch memory if it is a part.
    fn store(&self, kernel: &mut Kernel<'_>, group: &Group, sums: &[InnerProduct]) -> Result<(), String> {
        let (target, slices) = (self.target, self.slices());
        let values: Vec<&Value> = sums.iter().flat_map(InnerProduct::sums).collect();
        let each = values.len() / sums.len();
        let shared = kernel.shared(Repr::F32, values.len() * LANES);
        for (k, value) in values.iter().enumerate() {
            kernel.line(&format!("{shared}[{} + lane] = {};", k * LANES, value.text));
        }
        kernel.barrier();
        let small_count = sums.len();
        // Adjacent invocations store adjacent elements of the product.
        let (line, other) = match self.small_side {
            LEFT => (format!("lane % {}", self.lines), format!("lane / {}", self.lines)),
            _ => (format!("lane / {small_count}"), format!("lane % {small_count}")),
        };
        let (first_index, other) = (kernel.int(line), kernel.int(other));
        let line = kernel.int(format!("{} + {first_index}", group.first));
        let depth = kernel.depth();
        let inside = [Some(format!("lane < {}", small_count * self.lines)), self.line_condition(&line)];
        kernel.begin_if_live(Some(inside.into_iter().flatten().collect::<Vec<_>>().join(" && ")));
        let product = InnerProduct::new(kernel, target.factors.precision());
        let open = kernel.depth();
        let slice = kernel.begin_loop("0", &slices.to_string());
        let lane = match self.along_terms {
            true => format!("{first_index} * {slices} + {slice}"),
            false => format!("{slice} * {} + {first_index}", self.lines),
        };
        let part = |k: usize| format!("{shared}[({other} * {each} + {k}) * {LANES} + {lane}]");
        let parts: Vec<Value> = (0..each).map(|k| Value::new(part(k), Repr::F32)).collect();
        product.add_sums(kernel, &parts);
        kernel.close_to(open);
        let element = if self.small_side == LEFT { [&*other, &*line] } else { [&*line, &*other] };
        let at = target.factors.point(kernel, &group.batch, element);
        if self.split.count == 1 {
            let result = product.result(kernel);
            target.finish(kernel, at, result)?;
        } else {
            for (k, sum) in product.sums().enumerate() {
                target.store_part(kernel, &at, &group.part, (k, sum));
            }
        }
        kernel.close_to(depth);
        Ok(())
    }
}
