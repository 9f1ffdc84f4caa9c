//! Attention kernels: first the statistics of each row of scores, then every result. A moderate number of scores is
//! stored between launches; otherwise each kernel recomputes them.

use ortrain_expr::{Precision, ReduceOp, Scalar};
use ortrain_program::{Attention, AttentionGradients, AttentionPass, Nest, Operand};

use crate::context::Context;
use crate::expr::{AnalyzedNest, Point, position};
use crate::inner_product::{LEFT, MatmulOperands, are_terms_adjacent};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::repr::{Repr, Value, type_of};
use crate::row_reduction::Row;
use crate::split_k::MatmulOutput;
use crate::thread_reduction::combine;
use crate::workgroup_reduce::StageArrays;
use crate::{matmul_strategy, nest, tiled};

/// Number of statistics per row: largest score, sum of exponentials, and sum for the gradient of the softmax.
const STATISTICS_PER_ROW: usize = 3;
/// Maximum number of stored scores. It depends on sizes alone, so results are bitwise equal on every device.
const MAX_STORED_SCORES: usize = 1 << 23;
/// Maximum size of queries and values for stored scores: longer sums would be split.
const MAX_STORED_SIZE: usize = 256;

/// Result of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResultKind {
    Output,
    /// Gradient of the queries.
    Queries,
    /// Gradient of the keys.
    Keys,
    /// Gradient of the values.
    Values,
}

/// Result as a batch of matrix products. The left factor is computed from scores on the fly; the right factor is an
/// operand.
struct ResultProduct<'p, 'n> {
    printer: &'p Printer<'n>,
    kind: ResultKind,
}

/// Attention with its analyzed nests.
struct Printer<'n> {
    a: &'n Attention,
    /// Type of scores and weights.
    repr: Repr,
    scores: AnalyzedNest<'n>,
    weights: AnalyzedNest<'n>,
    gradient_nests: Option<GradientNests<'n>>,
    /// Offsets in scratch memory, if values are stored: scores, and products of the incoming gradient and the values.
    stored_offsets: Option<[usize; 2]>,
}

/// Stored products of all pairs: of queries and keys, which become scores, or of the incoming gradient and the values.
struct PairProducts<'p, 'n> {
    printer: &'p Printer<'n>,
    factors: [&'p Operand; 2],
    size: usize,
    /// Offset in scratch memory.
    first: usize,
    are_scores: bool,
}

/// Nests of the gradients.
struct GradientNests<'n> {
    gradients: &'n AttentionGradients,
    weights: AnalyzedNest<'n>,
    softmax: AnalyzedNest<'n>,
    scores: AnalyzedNest<'n>,
}

pub(crate) fn launches(cx: &Context<'_>, a: &Attention) -> Result<Vec<Launch>, String> {
    let mut printer = Printer::new(cx, a)?;
    let rows = a.batch.iter().product::<usize>() * a.queries;
    let is_double = printer.repr == Repr::F64;
    cx.reserve_permanently(rows * STATISTICS_PER_ROW * if is_double { 2 } else { 1 });
    let mut launches = Vec::new();
    if !is_double && rows * a.keys <= MAX_STORED_SCORES && a.size.max(a.width) <= MAX_STORED_SIZE {
        let scores = cx.reserve_permanently(rows * a.keys);
        let products =
            if printer.gradient_nests.is_some() { cx.reserve_permanently(rows * a.keys) } else { 0 };
        printer.stored_offsets = Some([scores, products]);
        launches.extend(printer.stored_launches(cx, [scores, products])?);
    }
    launches.push(printer.statistics(cx)?);
    let mut finish = |nest: &Nest, kind: ResultKind| {
        let sum = ResultProduct { printer: &printer, kind };
        let plain = |kernel: &mut Kernel<'_>, at: &[String]| Ok(vec![sum.single_element(kernel, at)?]);
        launches.extend(match is_double {
            true => nest::launches(cx, nest, &plain)?,
            false => matmul_strategy::launches(cx, &sum, nest, &plain)?,
        });
        Ok::<(), String>(())
    };
    match &a.pass {
        AttentionPass::Output(output) => finish(output, ResultKind::Output)?,
        AttentionPass::Gradients(gradients) => {
            for (nest, kind) in [
                (&gradients.q, ResultKind::Queries),
                (&gradients.k, ResultKind::Keys),
                (&gradients.v, ResultKind::Values),
            ] {
                nest.as_ref().map_or(Ok(()), |nest| finish(nest, kind))?;
            }
        }
    }
    Ok(launches)
}

/// Splits a point into its batch index and its last two coordinates.
fn split(at: &[String]) -> (&[String], &str, &str) {
    let (batch, last) = at.split_at(at.len() - 2);
    (batch, &last[0], &last[1])
}

fn with(batch: &[String], last: [&str; 2]) -> Vec<String> {
    batch.iter().cloned().chain(last.map(String::from)).collect()
}

fn element(
    kernel: &mut Kernel<'_>,
    from: &Operand,
    batch: &[String],
    last: [&str; 2],
) -> Result<Value, String> {
    let value = kernel.load(from.buffer, &position(from, &with(batch, last)));
    Ok(kernel.define(value))
}

impl MatmulOperands for PairProducts<'_, '_> {
    fn batch(&self) -> Vec<usize> {
        self.printer.a.batch.to_vec()
    }

    fn sides(&self) -> [usize; 3] {
        [self.printer.a.queries, self.printer.a.keys, self.size]
    }

    fn precision(&self) -> Precision {
        Precision::F32
    }

    fn runs_along_terms(&self, side: usize) -> bool {
        let strides = &self.factors[side].access.strides;
        let [lines, terms] = [2, 1].map(|from_end| strides[strides.len() - from_end]);
        are_terms_adjacent(lines, terms)
    }

    fn element(
        &self,
        kernel: &mut Kernel<'_>,
        side: usize,
        line: &[String],
        term: &[String],
    ) -> Result<Value, String> {
        let (line, batch) = line.split_last().expect("a line has an index");
        element(kernel, self.factors[side], batch, [line, &term[0]])
    }

    /// Stores the product.
    fn finish(
        &self,
        kernel: &mut Kernel<'_>,
        scores: &AnalyzedNest<'_>,
        at: Vec<String>,
        product: Value,
    ) -> Result<(), String> {
        let (batch, i, j) = split(&at);
        let value = match self.are_scores {
            true => self.printer.apply_nest(kernel, scores, batch, [i, j], vec![product])?,
            false => product,
        };
        let offset = self.printer.stored_offset(self.first, batch, i, j);
        kernel.set_scratch(&offset, &value);
        Ok(())
    }
}

impl ResultProduct<'_, '_> {
    /// Returns the operand that is the right factor.
    fn right(&self) -> &Operand {
        let a = self.printer.a;
        match (self.kind, &a.pass) {
            (ResultKind::Output, _) => &a.v,
            (ResultKind::Queries, _) => &a.k,
            (ResultKind::Values, AttentionPass::Gradients(gradients)) => &gradients.output_gradient,
            _ => &a.q,
        }
    }

    /// Prints an element of the left factor.
    fn left(
        &self,
        kernel: &mut Kernel<'_>,
        batch: &[String],
        row: &str,
        term: &str,
    ) -> Result<Value, String> {
        match self.kind {
            ResultKind::Output => self.printer.weight(kernel, batch, row, term),
            ResultKind::Queries => self.printer.product_gradient(kernel, batch, row, term),
            ResultKind::Keys => self.printer.product_gradient(kernel, batch, term, row),
            ResultKind::Values => self.printer.weight(kernel, batch, term, row),
        }
    }

    /// Prints a single element of the result, without shared loads.
    fn single_element(&self, kernel: &mut Kernel<'_>, at: &[String]) -> Result<Value, String> {
        let (batch, row, column) = split(at);
        self.printer.sum_products(kernel, self.sides()[2], |kernel, term| {
            Ok([self.left(kernel, batch, row, term)?, element(kernel, self.right(), batch, [term, column])?])
        })
    }
}

impl MatmulOperands for ResultProduct<'_, '_> {
    fn batch(&self) -> Vec<usize> {
        self.printer.a.batch.to_vec()
    }

    fn sides(&self) -> [usize; 3] {
        let Attention { queries, keys, size, width, .. } = *self.printer.a;
        match self.kind {
            ResultKind::Output => [queries, width, keys],
            ResultKind::Queries => [queries, size, keys],
            ResultKind::Keys => [keys, size, queries],
            ResultKind::Values => [keys, width, queries],
        }
    }

    fn precision(&self) -> Precision {
        Precision::F32
    }

    fn is_costly(&self) -> bool {
        self.printer.stored_offsets.is_none()
    }

    /// Stored scores are row-major.
    fn runs_along_terms(&self, side: usize) -> bool {
        let by_rows = matches!(self.kind, ResultKind::Output | ResultKind::Queries);
        side == LEFT && (by_rows || self.printer.stored_offsets.is_none())
    }

    fn element(
        &self,
        kernel: &mut Kernel<'_>,
        side: usize,
        line: &[String],
        term: &[String],
    ) -> Result<Value, String> {
        let (line, batch) = line.split_last().expect("a line has an index");
        match side {
            LEFT => self.left(kernel, batch, line, &term[0]),
            _ => element(kernel, self.right(), batch, [&term[0], line]),
        }
    }
}

impl<'n> Printer<'n> {
    fn new(cx: &Context<'_>, a: &'n Attention) -> Result<Printer<'n>, String> {
        let repr = cx.float_repr(a.q.access.dtype)?;
        let gradient_nests = match &a.pass {
            AttentionPass::Output(_) => None,
            AttentionPass::Gradients(gradients) => Some(GradientNests {
                gradients,
                weights: AnalyzedNest::new(cx, &gradients.weights)?,
                softmax: AnalyzedNest::new(cx, &gradients.softmax)?,
                scores: AnalyzedNest::new(cx, &gradients.scores)?,
            }),
        };
        let (scores, weights) = (AnalyzedNest::new(cx, &a.scores)?, AnalyzedNest::new(cx, &a.weights)?);
        Ok(Printer { a, repr, scores, weights, gradient_nests, stored_offsets: None })
    }

    /// Returns the launches that compute the stored values.
    fn stored_launches(
        &self,
        cx: &Context<'_>,
        [scores, products]: [usize; 2],
    ) -> Result<Vec<Launch>, String> {
        let Attention { q, k, v, size, width, .. } = self.a;
        let of = |factors, size, first, are_scores| PairProducts {
            printer: self,
            factors,
            size,
            first,
            are_scores,
        };
        let mut stored = vec![of([q, k], *size, scores, true)];
        stored.extend(self.gradient_nests.as_ref().map(|gradient_nests| {
            of([&gradient_nests.gradients.output_gradient, v], *width, products, false)
        }));
        let launches = |pairs: &PairProducts<'_, '_>| {
            tiled::launches(cx, &MatmulOutput::new(cx, pairs, &self.a.scores)?)
        };
        stored.iter().map(launches).collect::<Result<Vec<_>, String>>().map(|launches| launches.concat())
    }

    /// Returns the index of a row.
    fn row_index(&self, batch: &[String], i: &str) -> String {
        let batch = batch.iter().zip(&self.a.batch);
        let head = batch.fold(String::from("0"), |head, (at, size)| format!("({head} * {size} + {at})"));
        format!("({head} * {} + {i})", self.a.queries)
    }

    /// Returns the scratch offset of the stored value for a query and a key.
    fn stored_offset(&self, first: usize, batch: &[String], i: &str, j: &str) -> String {
        format!("{first} + {} * {} + {j}", self.row_index(batch, i), self.a.keys)
    }

    /// Prints a sum of products over `count` terms.
    fn sum_products(
        &self,
        kernel: &mut Kernel<'_>,
        count: usize,
        factors: impl Fn(&mut Kernel<'_>, &str) -> Result<[Value; 2], String>,
    ) -> Result<Value, String> {
        let total = kernel.constant(Scalar::F64(0.0).convert(type_of(self.repr)), self.repr);
        let total = kernel.variable(&total);
        let depth = kernel.depth();
        let at = kernel.begin_loop("0", &count.to_string());
        let [x, y] = factors(kernel, &at)?;
        kernel.assign(&total, &Value::new(format!("{} + {} * {}", total.text, x.text, y.text), self.repr));
        kernel.close_to(depth);
        Ok(total)
    }

    /// Prints the inner product of two rows of operands.
    fn product(
        &self,
        kernel: &mut Kernel<'_>,
        batch: &[String],
        lines: [(&Operand, &str); 2],
        size: usize,
    ) -> Result<Value, String> {
        self.sum_products(kernel, size, |kernel, l| {
            let [(x, i), (y, j)] = lines;
            Ok([element(kernel, x, batch, [i, l])?, element(kernel, y, batch, [j, l])?])
        })
    }

    /// Prints the result of a nest at a point of the scores, from the values of its accumulators.
    fn apply_nest(
        &self,
        kernel: &mut Kernel<'_>,
        known: &AnalyzedNest<'_>,
        batch: &[String],
        at: [&str; 2],
        accumulators: Vec<Value>,
    ) -> Result<Value, String> {
        let point = Point { at: with(batch, at), accumulators, ..Point::default() };
        let values = known.print(kernel, &point, &[known.nest.expr.outputs()[0]])?;
        Ok(kernel.as_repr(&values[0], self.repr))
    }

    fn score(&self, kernel: &mut Kernel<'_>, batch: &[String], i: &str, j: &str) -> Result<Value, String> {
        if let Some([scores, _]) = self.stored_offsets {
            let stored = kernel.scratch(&self.stored_offset(scores, batch, i, j), Repr::F32);
            return Ok(kernel.define(stored));
        }
        let product = self.product(kernel, batch, [(&self.a.q, i), (&self.a.k, j)], self.a.size)?;
        self.apply_nest(kernel, &self.scores, batch, [i, j], vec![product])
    }

    /// Returns the scratch offset of a statistic of a row.
    fn statistic_offset(&self, batch: &[String], i: &str, statistic: usize) -> String {
        format!("{} * {STATISTICS_PER_ROW} + {statistic}", self.row_index(batch, i))
    }

    fn power(&self, kernel: &mut Kernel<'_>, score: &Value, row_max: &Value) -> Value {
        let name = if self.repr == Repr::F64 { "exp_f64" } else { "exp_f32" };
        kernel.define(Value::new(format!("{name}({} - {})", score.text, row_max.text), self.repr))
    }

    /// Prints an element of the softmax.
    fn softmax(&self, kernel: &mut Kernel<'_>, batch: &[String], i: &str, j: &str) -> Result<Value, String> {
        let score = self.score(kernel, batch, i, j)?;
        let row_max = kernel.scratch(&self.statistic_offset(batch, i, 0), self.repr);
        let total = kernel.scratch(&self.statistic_offset(batch, i, 1), self.repr).text;
        let power = self.power(kernel, &score, &row_max);
        Ok(kernel.define(Value::new(format!("{} / {total}", power.text), self.repr)))
    }

    /// Prints the weight of a value.
    fn weight(&self, kernel: &mut Kernel<'_>, batch: &[String], i: &str, j: &str) -> Result<Value, String> {
        let softmax = self.softmax(kernel, batch, i, j)?;
        self.apply_nest(kernel, &self.weights, batch, [i, j], vec![softmax])
    }

    /// Prints the gradient of an element of the softmax, and the softmax factor of the gradient.
    fn softmax_gradient(
        &self,
        kernel: &mut Kernel<'_>,
        gradient_nests: &GradientNests<'_>,
        (batch, i, j): (&[String], &str, &str),
        softmax: &Value,
    ) -> Result<[Value; 2], String> {
        let of_weight = match self.stored_offsets {
            Some([_, products]) => {
                let stored = kernel.scratch(&self.stored_offset(products, batch, i, j), Repr::F32);
                kernel.define(stored)
            }
            None => {
                let lines = [(&gradient_nests.gradients.output_gradient, i), (&self.a.v, j)];
                self.product(kernel, batch, lines, self.a.width)?
            }
        };
        let arguments = vec![of_weight, softmax.clone()];
        let of_softmax = self.apply_nest(kernel, &gradient_nests.weights, batch, [i, j], arguments)?;
        let softmax_value =
            self.apply_nest(kernel, &gradient_nests.softmax, batch, [i, j], vec![softmax.clone()])?;
        Ok([of_softmax, softmax_value])
    }

    /// Prints the gradient of the product of a query and a key.
    fn product_gradient(
        &self,
        kernel: &mut Kernel<'_>,
        batch: &[String],
        i: &str,
        j: &str,
    ) -> Result<Value, String> {
        let gradient_nests = self.gradient_nests.as_ref().ok_or("no gradients are requested")?;
        let softmax = self.softmax(kernel, batch, i, j)?;
        let [of_softmax, softmax_value] =
            self.softmax_gradient(kernel, gradient_nests, (batch, i, j), &softmax)?;
        let total = kernel.scratch(&self.statistic_offset(batch, i, 2), self.repr).text;
        let of_score = format!("{} * ({} - {total})", softmax_value.text, of_softmax.text);
        let of_score = kernel.define(Value::new(of_score, self.repr));
        self.apply_nest(kernel, &gradient_nests.scores, batch, [i, j], vec![of_score])
    }

    /// Returns the launch that computes the statistics of every row. Several invocations of a group share a row.
    fn statistics(&self, cx: &Context<'_>) -> Result<Launch, String> {
        let Attention { batch, queries, keys, .. } = self.a;
        let dims: Vec<usize> = batch.iter().copied().chain([*queries]).collect();
        let mut kernel = cx.group_kernel();
        let row = Row::define(&mut kernel, &dims, *keys);
        let (i, batch) = row.at.split_last().expect("the rows have a query axis");
        let mut arrays = StageArrays::default();
        let mut over_row =
            |kernel: &mut Kernel<'_>,
             op: ReduceOp,
             of: &dyn Fn(&mut Kernel<'_>, &str) -> Result<Value, String>| {
                let neutral = kernel.constant(op.neutral(type_of(self.repr)), self.repr);
                let total = kernel.variable(&neutral);
                let depth = kernel.depth();
                let j = row.span.begin_loop(kernel);
                let value = of(kernel, &j)?;
                let both = combine(kernel, op, &total, &value);
                kernel.assign(&total, &both);
                kernel.close_to(depth);
                Ok::<Value, String>(arrays.combine_lanes(kernel, &[op], &[total], &row.slices()).remove(0))
            };
        let row_max = over_row(&mut kernel, ReduceOp::Max, &|kernel, j| self.score(kernel, batch, i, j))?;
        let total = over_row(&mut kernel, ReduceOp::Sum, &|kernel, j| {
            let score = self.score(kernel, batch, i, j)?;
            Ok(self.power(kernel, &score, &row_max))
        })?;
        let mut statistics = vec![row_max.clone(), total.clone()];
        if let Some(gradient_nests) = &self.gradient_nests {
            statistics.push(over_row(&mut kernel, ReduceOp::Sum, &|kernel, j| {
                let score = self.score(kernel, batch, i, j)?;
                let power = self.power(kernel, &score, &row_max);
                let softmax = format!("{} / {}", power.text, total.text);
                let softmax = kernel.define(Value::new(softmax, self.repr));
                let [of_softmax, softmax_value] =
                    self.softmax_gradient(kernel, gradient_nests, (batch, i, j), &softmax)?;
                Ok(kernel
                    .define(Value::new(format!("{} * {}", of_softmax.text, softmax_value.text), self.repr)))
            })?);
        }
        let depth = kernel.depth();
        row.when_first(&mut kernel);
        for (index, value) in statistics.iter().enumerate() {
            kernel.set_scratch(&self.statistic_offset(batch, i, index), value);
        }
        kernel.close_to(depth);
        cx.finish_groups(kernel, row.groups)
    }
}
