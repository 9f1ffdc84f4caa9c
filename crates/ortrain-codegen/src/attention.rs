//! Attention: statistics of each row of scores first, then every result, for which scores are made again.

use ortrain_expr::{DType, Precision, ReduceOp};
use ortrain_program::{Attention, AttentionGradients, AttentionPass, Nest, Operand};

use crate::dialect::Repr;
use crate::expr::{Known, Point, position};
use crate::kernel::{Kernel, Value, float64};
use crate::launch::Launch;
use crate::lower::Context;
use crate::points::coordinates;
use crate::product::{Factors, LEFT};
use crate::products;
use crate::reduce::combine;

/// Numbers that are kept of a row: the largest score, the sum of the powers, the sum of what comes back.
const STATISTICS: usize = 3;

/// A result of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Output,
    /// The gradient of queries.
    Queries,
    /// The gradient of keys.
    Keys,
    /// The gradient of values.
    Values,
}

/// A result as products of matrices. The left factor is made of scores, and nobody keeps it; the right one is an operand.
struct Sum<'p, 'n> {
    printer: &'p Printer<'n>,
    kind: Kind,
}

/// An attention with what is known of its nests.
struct Printer<'n> {
    a: &'n Attention,
    scores: Known<'n>,
    weights: Known<'n>,
    back: Option<Back<'n>>,
}

/// The nests of the way back.
struct Back<'n> {
    gradients: &'n AttentionGradients,
    weights: Known<'n>,
    softmax: Known<'n>,
    scores: Known<'n>,
}

pub(crate) fn launches(cx: &Context<'_>, a: &Attention) -> Result<Vec<Launch>, String> {
    if a.q.access.dtype == DType::F64 {
        return Err(float64());
    }
    let printer = Printer::new(a)?;
    cx.keep(a.batch.iter().product::<usize>() * a.queries * STATISTICS);
    let mut launches = vec![printer.statistics(cx)?];
    let mut finish = |nest: &Nest, kind: Kind| {
        let sum = Sum { printer: &printer, kind };
        launches.extend(products::launches(cx, &sum, nest, &|kernel, at| Ok(vec![sum.alone(kernel, at)?]))?);
        Ok::<(), String>(())
    };
    match &a.pass {
        AttentionPass::Output(output) => finish(output, Kind::Output)?,
        AttentionPass::Gradients(gradients) => {
            for (nest, kind) in
                [(&gradients.q, Kind::Queries), (&gradients.k, Kind::Keys), (&gradients.v, Kind::Values)]
            {
                nest.as_ref().map_or(Ok(()), |nest| finish(nest, kind))?;
            }
        }
    }
    Ok(launches)
}

/// The batch index of a point, and its last two positions.
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

impl Sum<'_, '_> {
    /// The operand that is the right factor.
    fn right(&self) -> &Operand {
        let a = self.printer.a;
        match (self.kind, &a.pass) {
            (Kind::Output, _) => &a.v,
            (Kind::Queries, _) => &a.k,
            (Kind::Values, AttentionPass::Gradients(gradients)) => &gradients.given,
            _ => &a.q,
        }
    }

    /// An element of the left factor.
    fn left(
        &self,
        kernel: &mut Kernel<'_>,
        batch: &[String],
        row: &str,
        term: &str,
    ) -> Result<Value, String> {
        match self.kind {
            Kind::Output => self.printer.weight(kernel, batch, row, term),
            Kind::Queries => self.printer.of_product(kernel, batch, row, term),
            Kind::Keys => self.printer.of_product(kernel, batch, term, row),
            Kind::Values => self.printer.weight(kernel, batch, term, row),
        }
    }

    /// An element of the result by itself.
    fn alone(&self, kernel: &mut Kernel<'_>, at: &[String]) -> Result<Value, String> {
        let (batch, row, column) = split(at);
        self.printer.over(kernel, self.sides()[2], |kernel, term| {
            Ok([self.left(kernel, batch, row, term)?, element(kernel, self.right(), batch, [term, column])?])
        })
    }
}

impl Factors for Sum<'_, '_> {
    fn batch(&self) -> Vec<usize> {
        self.printer.a.batch.to_vec()
    }

    fn sides(&self) -> [usize; 3] {
        let Attention { queries, keys, size, width, .. } = *self.printer.a;
        match self.kind {
            Kind::Output => [queries, width, keys],
            Kind::Queries => [queries, size, keys],
            Kind::Keys => [keys, size, queries],
            Kind::Values => [keys, width, queries],
        }
    }

    fn precision(&self) -> Precision {
        Precision::F32
    }

    fn is_costly(&self) -> bool {
        true
    }

    fn runs_along_terms(&self, side: usize) -> bool {
        side == LEFT
    }

    fn element(
        &self,
        kernel: &mut Kernel<'_>,
        side: usize,
        line: &[String],
        term: &[String],
    ) -> Result<Value, String> {
        let (line, batch) = line.split_last().expect("a line has a number");
        match side {
            LEFT => self.left(kernel, batch, line, &term[0]),
            _ => element(kernel, self.right(), batch, [&term[0], line]),
        }
    }
}

impl<'n> Printer<'n> {
    fn new(a: &'n Attention) -> Result<Printer<'n>, String> {
        let back = match &a.pass {
            AttentionPass::Output(_) => None,
            AttentionPass::Gradients(gradients) => Some(Back {
                gradients,
                weights: Known::new(&gradients.weights)?,
                softmax: Known::new(&gradients.softmax)?,
                scores: Known::new(&gradients.scores)?,
            }),
        };
        Ok(Printer { a, scores: Known::new(&a.scores)?, weights: Known::new(&a.weights)?, back })
    }

    /// A sum of products over so many positions.
    fn over(
        &self,
        kernel: &mut Kernel<'_>,
        count: usize,
        factors: impl Fn(&mut Kernel<'_>, &str) -> Result<[Value; 2], String>,
    ) -> Result<Value, String> {
        let total = kernel.variable(&Value::new("0.0f", Repr::F32));
        let depth = kernel.depth();
        let at = kernel.counted("0", &count.to_string());
        let [x, y] = factors(kernel, &at)?;
        kernel.assign(&total, &Value::new(format!("{} + {} * {}", total.text, x.text, y.text), Repr::F32));
        kernel.close_to(depth);
        Ok(total)
    }

    /// The product of two lines of operands.
    fn product(
        &self,
        kernel: &mut Kernel<'_>,
        batch: &[String],
        lines: [(&Operand, &str); 2],
        size: usize,
    ) -> Result<Value, String> {
        self.over(kernel, size, |kernel, l| {
            let [(x, i), (y, j)] = lines;
            Ok([element(kernel, x, batch, [i, l])?, element(kernel, y, batch, [j, l])?])
        })
    }

    /// The result of a nest for given values at a point of the scores.
    fn through(
        kernel: &mut Kernel<'_>,
        known: &Known<'_>,
        batch: &[String],
        at: [&str; 2],
        accumulators: Vec<Value>,
    ) -> Result<Value, String> {
        let point = Point { at: with(batch, at), accumulators, ..Point::default() };
        let values = known.print(kernel, &point, &[known.nest.expr.outputs()[0]])?;
        Ok(kernel.as_repr(&values[0], Repr::F32))
    }

    fn score(&self, kernel: &mut Kernel<'_>, batch: &[String], i: &str, j: &str) -> Result<Value, String> {
        let product = self.product(kernel, batch, [(&self.a.q, i), (&self.a.k, j)], self.a.size)?;
        Printer::through(kernel, &self.scores, batch, [i, j], vec![product])
    }

    /// The place of a statistic of a row.
    fn place(&self, batch: &[String], i: &str, number: usize) -> String {
        let batch = batch.iter().zip(&self.a.batch);
        let head = batch.fold(String::from("0i"), |head, (at, size)| format!("({head} * {size} + {at})"));
        format!("({head} * {} + {i}) * {STATISTICS} + {number}", self.a.queries)
    }

    fn power(kernel: &mut Kernel<'_>, score: &Value, most: &Value) -> Value {
        kernel.define(Value::new(format!("exp_f32({} - {})", score.text, most.text), Repr::F32))
    }

    /// An element of the softmax.
    fn softmax(&self, kernel: &mut Kernel<'_>, batch: &[String], i: &str, j: &str) -> Result<Value, String> {
        let score = self.score(kernel, batch, i, j)?;
        let most = kernel.scratch(&self.place(batch, i, 0), Repr::F32);
        let total = kernel.scratch(&self.place(batch, i, 1), Repr::F32).text;
        let power = Printer::power(kernel, &score, &most);
        Ok(kernel.define(Value::new(format!("{} / {total}", power.text), Repr::F32)))
    }

    /// The weight of a value.
    fn weight(&self, kernel: &mut Kernel<'_>, batch: &[String], i: &str, j: &str) -> Result<Value, String> {
        let softmax = self.softmax(kernel, batch, i, j)?;
        Printer::through(kernel, &self.weights, batch, [i, j], vec![softmax])
    }

    /// The gradient of an element of the softmax, and what is left of the element for the way back.
    fn back(
        &self,
        kernel: &mut Kernel<'_>,
        back: &Back<'_>,
        (batch, i, j): (&[String], &str, &str),
        softmax: &Value,
    ) -> Result<[Value; 2], String> {
        let lines = [(&back.gradients.given, i), (&self.a.v, j)];
        let of_weight = self.product(kernel, batch, lines, self.a.width)?;
        let given = vec![of_weight, softmax.clone()];
        let of_softmax = Printer::through(kernel, &back.weights, batch, [i, j], given)?;
        let kept = Printer::through(kernel, &back.softmax, batch, [i, j], vec![softmax.clone()])?;
        Ok([of_softmax, kept])
    }

    /// The gradient of the product of a query and a key.
    fn of_product(
        &self,
        kernel: &mut Kernel<'_>,
        batch: &[String],
        i: &str,
        j: &str,
    ) -> Result<Value, String> {
        let back = self.back.as_ref().ok_or("no gradients are asked for")?;
        let softmax = self.softmax(kernel, batch, i, j)?;
        let [of_softmax, kept] = self.back(kernel, back, (batch, i, j), &softmax)?;
        let total = kernel.scratch(&self.place(batch, i, 2), Repr::F32).text;
        let of_score = format!("{} * ({} - {total})", kept.text, of_softmax.text);
        let of_score = kernel.define(Value::new(of_score, Repr::F32));
        Printer::through(kernel, &back.scores, batch, [i, j], vec![of_score])
    }

    /// The launch that leaves the statistics of every row.
    fn statistics(&self, cx: &Context<'_>) -> Result<Launch, String> {
        let Attention { batch, queries, keys, .. } = self.a;
        let dims: Vec<usize> = batch.iter().copied().chain([*queries]).collect();
        let mut kernel = cx.kernel();
        let at = coordinates(&mut kernel, "id", &dims);
        let (i, batch) = at.split_last().expect("there is an axis of queries");
        let most = ReduceOp::Max.neutral(ortrain_expr::Type::F32);
        let most = kernel.constant(most, Repr::F32);
        let most = kernel.variable(&most);
        let j = kernel.counted("0", &keys.to_string());
        let score = self.score(&mut kernel, batch, i, &j)?;
        let larger = combine(&kernel, ReduceOp::Max, &most, &score);
        kernel.assign(&most, &larger);
        kernel.close_to(0);
        let total = kernel.variable(&Value::new("0.0f", Repr::F32));
        let j = kernel.counted("0", &keys.to_string());
        let score = self.score(&mut kernel, batch, i, &j)?;
        let power = Printer::power(&mut kernel, &score, &most);
        let sum = combine(&kernel, ReduceOp::Sum, &total, &power);
        kernel.assign(&total, &sum);
        kernel.close_to(0);
        kernel.set_scratch(&self.place(batch, i, 0), &most);
        kernel.set_scratch(&self.place(batch, i, 1), &total);
        if let Some(back) = &self.back {
            let sum = self.over(&mut kernel, *keys, |kernel, j| {
                let score = self.score(kernel, batch, i, j)?;
                let power = Printer::power(kernel, &score, &most);
                let softmax = format!("{} / {}", power.text, total.text);
                let softmax = kernel.define(Value::new(softmax, Repr::F32));
                self.back(kernel, back, (batch, i, j), &softmax)
            })?;
            kernel.set_scratch(&self.place(batch, i, 2), &sum);
        }
        cx.finish(kernel, dims.iter().map(|&dim| dim as u64).product())
    }
}
