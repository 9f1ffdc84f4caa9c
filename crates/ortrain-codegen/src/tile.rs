//! Products by tiles: a group computes a square of the product, and shares what it loads of the factors.

use crate::dialect::{GROUP, Repr};
use crate::kernel::{Kernel, Value};
use crate::launch::Launch;
use crate::lower::Context;
use crate::points::coordinates;
use crate::product::{InnerProduct, LEFT, RIGHT, element_where, terms};
use crate::split::{Split, Target};

/// Invocations along each axis of a tile.
const ACROSS: usize = 16;
const LANES: usize = GROUP as usize;
/// Elements of a row of a shared factor: one more than there are, so that a column lies in different banks.
const PITCH: usize = ACROSS + 1;
/// Terms that are added without asking whether there are more.
const UNROLLED: usize = 4;
/// The names of floats that are one value.
const PARTS: [&str; 4] = ["x", "y", "z", "w"];
/// Groups of large tiles that keep a device busy; with fewer, tiles are small.
const BUSY: usize = 128;

/// The sizes of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    /// Rows and columns of the product.
    side: usize,
    /// Terms that are shared at once.
    depth: usize,
    split: Split,
}

impl Tile {
    fn of(batch: usize, [m, n, k]: [usize; 3], parts: usize) -> Tile {
        let of_side = |side: usize, depth: usize| {
            let groups = batch * m.div_ceil(side) * n.div_ceil(side);
            let split = Split::of(groups, k, depth);
            (Tile { side, depth, split }, groups * split.count)
        };
        // Several terms of factors need as much room as more of them.
        let (large, groups) = of_side(64, if parts > 1 { 8 } else { 16 });
        if m.min(n) <= 32 || groups < BUSY { of_side(32, 16).0 } else { large }
    }

    /// Rows and columns that an invocation has: every [`ACROSS`]th one.
    fn each(self) -> usize {
        self.side / ACROSS
    }

    /// The type of an element of the shared array: what an invocation has of a row or of a column, in one.
    fn repr(self) -> Repr {
        Repr::floats(self.each())
    }
}

/// The launches of a product by tiles.
pub(crate) fn launches(cx: &Context<'_>, target: &Target<'_>) -> Result<Vec<Launch>, String> {
    let factors = target.factors;
    let parts = factors.precision().terms();
    let tile = Tile::of(factors.batch().iter().product(), factors.sides(), parts);
    target.reserve(cx, tile.split);
    let mut launches = vec![Printer { target, tile, parts }.launch(cx)?];
    if tile.split.count > 1 {
        launches.push(target.add_up(cx, tile.split)?);
    }
    Ok(launches)
}

struct Printer<'t> {
    target: &'t Target<'t>,
    tile: Tile,
    /// Numbers that a factor is made of.
    parts: usize,
}

/// A group: the place of its tile in the batch, among the parts of sums, and in the product.
struct Group {
    batch: Vec<String>,
    part: String,
    /// The first row and the first column.
    first: [String; 2],
    /// The array that the group shares.
    shared: String,
}

/// The share of a factor that an invocation loads: elements of some lines, of one term at a time.
struct Loads {
    side: usize,
    /// The place among the lines, and among the terms.
    place: [String; 2],
    /// The names that elements of each line share, and the condition under which there is such a line.
    lines: Vec<(Vec<String>, Option<String>)>,
}

impl Printer<'_> {
    fn launch(&self, cx: &Context<'_>) -> Result<Launch, String> {
        let (factors, Tile { side, depth, split }) = (self.target.factors, self.tile);
        let [m, n, _] = factors.sides();
        let batch = factors.batch();
        let mut kernel = cx.group_kernel();
        let grid = [split.count, m.div_ceil(side), n.div_ceil(side)];
        let dims: Vec<usize> = batch.iter().copied().chain(grid).collect();
        let mut at = coordinates(&mut kernel, "group", &dims);
        let place = at.split_off(batch.len());
        let first = [1, 2].map(|axis| kernel.int(format!("{} * {side}", place[axis])));
        let room = (2 * self.parts * depth * PITCH).max(side * ACROSS);
        let shared = kernel.shared(self.tile.repr(), room);
        let group = Group { batch: at, part: place[0].clone(), first, shared };
        let sums = self.sums(&mut kernel, &group)?;
        self.store(&mut kernel, &group, &sums)?;
        cx.finish_groups(kernel, dims.iter().map(|&dim| dim as u64).product())
    }

    /// The place of a part of a factor in the shared array: a term of all lines that an invocation has.
    fn place(&self, side: usize, part: usize, line: &str, term: &str) -> String {
        let start = (side * self.parts + part) * self.tile.depth * PITCH;
        format!("{start} + ({term}) * {PITCH} + {line}")
    }

    /// The share of a factor that an invocation loads: neighbours load neighbours.
    fn loads(&self, kernel: &mut Kernel<'_>, group: &Group, side: usize) -> Loads {
        let (factors, Tile { side: size, depth, .. }) = (self.target.factors, self.tile);
        let along = factors.runs_along_terms(side);
        let fast = if along { depth } else { ACROSS };
        let (near, far) = (kernel.int(format!("lane % {fast}")), kernel.int(format!("lane / {fast}")));
        let place = if along { [far, near] } else { [near, far] };
        let all = factors.sides()[side];
        let line = |k: usize| {
            let line = kernel.int(format!("{} + {} + {}", group.first[side], place[0], k * ACROSS));
            let exists = (!all.is_multiple_of(size)).then(|| format!("{line} < {all}"));
            (factors.line(kernel, side, &group.batch, &line), exists)
        };
        let lines = (0..self.tile.each()).map(line).collect();
        Loads { side, place, lines }
    }

    /// Loads elements of a factor from a term on into the shared array.
    fn share(&self, kernel: &mut Kernel<'_>, group: &Group, loads: &Loads, from: &str) -> Result<(), String> {
        let (factors, Tile { depth, split, .. }) = (self.target.factors, self.tile);
        let open = kernel.depth();
        if ACROSS * depth < LANES {
            kernel.when(&format!("lane < {}", ACROSS * depth));
        }
        let [line_place, term_place] = &loads.place;
        let all = factors.sides()[2];
        let term = kernel.int(format!("{from} + {term_place}"));
        let is_term = (split.count * split.terms != all).then(|| format!("{term} < {all}"));
        let term = factors.term(kernel, loads.side, &term);
        let mut values: Vec<Vec<String>> = vec![Vec::new(); self.parts];
        for (line, exists) in &loads.lines {
            let conditions: Vec<&str> =
                [exists, &is_term].into_iter().flatten().map(String::as_str).collect();
            let condition = (!conditions.is_empty()).then(|| conditions.join(" && "));
            let value = element_where(kernel, factors, loads.side, condition.as_deref(), [line, &term])?;
            let parts = terms(kernel, factors.precision(), value);
            values.iter_mut().zip(parts).for_each(|(values, part)| values.push(part.text));
        }
        for (part, values) in values.iter().enumerate() {
            let to = self.place(loads.side, part, line_place, term_place);
            let value = kernel.dialect.floats(self.tile.repr(), values);
            kernel.line(&format!("{}[{to}] = {value};", group.shared));
        }
        kernel.close_to(open);
        Ok(())
    }

    /// The sums of each row that an invocation has, each with all of its columns.
    fn sums(&self, kernel: &mut Kernel<'_>, group: &Group) -> Result<Vec<InnerProduct>, String> {
        let (Tile { depth, split, .. }, repr) = (self.tile, self.tile.repr());
        let precision = self.target.factors.precision();
        let sums: Vec<InnerProduct> =
            (0..self.tile.each()).map(|_| InnerProduct::of(kernel, precision, repr)).collect();
        let loads = [LEFT, RIGHT].map(|side| self.loads(kernel, group, side));
        let own = self.own(kernel);
        let open = kernel.depth();
        let step = kernel.counted("0", &(split.terms / depth).to_string());
        let from = kernel.int(format!("{} * {} + {step} * {depth}", group.part, split.terms));
        for loads in &loads {
            self.share(kernel, group, loads, &from)?;
        }
        kernel.barrier();
        let inner = kernel.depth();
        let terms = kernel.counted("0", &(depth / UNROLLED).to_string());
        for k in 0..UNROLLED {
            let term = format!("{terms} * {UNROLLED} + {k}");
            let factors = [LEFT, RIGHT].map(|side| -> Vec<Value> {
                let place = |part| format!("{}[{}]", group.shared, self.place(side, part, &own[side], &term));
                (0..self.parts).map(|part| kernel.define(Value::new(place(part), repr))).collect()
            });
            for (sum, name) in sums.iter().zip(PARTS) {
                let of_row = |part: &Value| Value::new(format!("{}.{name}", part.text), Repr::F32);
                let left: Vec<Value> = factors[LEFT].iter().map(of_row).collect();
                sum.add_terms(kernel, &left, &factors[RIGHT]);
            }
        }
        kernel.close_to(inner);
        kernel.barrier();
        kernel.close_to(open);
        Ok(sums)
    }

    /// The first row and the first column of an invocation in the tile.
    fn own(&self, kernel: &mut Kernel<'_>) -> [String; 2] {
        [kernel.int(format!("lane / {ACROSS}")), kernel.int(format!("lane % {ACROSS}"))]
    }

    /// Hands the sums on, through the shared array: neighbours then have neighbouring columns of one row.
    fn store(&self, kernel: &mut Kernel<'_>, group: &Group, sums: &[InnerProduct]) -> Result<(), String> {
        let is_whole = self.tile.split.count == 1;
        let results: Vec<Vec<String>> = match is_whole {
            true => vec![sums.iter().map(|sum| self.results(kernel, sum)).collect()],
            false => {
                let of_rows = |number: usize| sums.iter().filter_map(move |sum| sum.sums().nth(number));
                let texts = |number| of_rows(number).map(|sum| sum.text.clone()).collect();
                (0..sums[0].sums().count()).map(texts).collect()
            }
        };
        let own = self.own(kernel);
        for (number, rows) in results.iter().enumerate() {
            if number > 0 {
                kernel.barrier();
            }
            for (k, row) in rows.iter().enumerate() {
                let place = format!("({} + {}) * {ACROSS} + {}", own[LEFT], k * ACROSS, own[RIGHT]);
                kernel.line(&format!("{}[{place}] = {row};", group.shared));
            }
            kernel.barrier();
            self.store_shared(kernel, group, is_whole, number)?;
        }
        Ok(())
    }

    /// The results of inner products side by side.
    fn results(&self, kernel: &Kernel<'_>, sums: &InnerProduct) -> String {
        let names = &PARTS[..self.tile.each()];
        let parts: Vec<String> = names.iter().map(|name| sums.part(name).result(kernel).text).collect();
        kernel.dialect.floats(self.tile.repr(), &parts)
    }

    /// Finishes, or leaves, what the shared array has.
    fn store_shared(
        &self,
        kernel: &mut Kernel<'_>,
        group: &Group,
        is_whole: bool,
        number: usize,
    ) -> Result<(), String> {
        let (target, side) = (self.target, self.tile.side);
        let sides = target.factors.sides();
        let depth = kernel.depth();
        let k = kernel.counted("0", &(side * side / LANES).to_string());
        let element = kernel.int(format!("lane + {k} * {LANES}"));
        let [i, j] = [("/", LEFT), ("%", RIGHT)]
            .map(|(sign, axis)| kernel.int(format!("{} + {element} {sign} {side}", group.first[axis])));
        let inside: Vec<String> = [(&i, sides[LEFT]), (&j, sides[RIGHT])]
            .into_iter()
            .filter(|(_, size)| !size.is_multiple_of(side))
            .map(|(at, size)| format!("{at} < {size}"))
            .collect();
        kernel.when_live((!inside.is_empty()).then(|| inside.join(" && ")));
        let at = target.factors.point(kernel, &group.batch, [&i, &j]);
        let place = format!("{element} / {side} * {ACROSS} + {element} % {ACROSS}");
        let part = format!("{element} % {side} / {ACROSS}");
        let value = kernel.dialect.part_of(&group.shared, &place, &part);
        let value = kernel.define(Value::new(value, Repr::F32));
        match is_whole {
            true => target.finish(kernel, at, value)?,
            false => target.leave(kernel, &at, &group.part, (number, &value)),
        }
        kernel.close_to(depth);
        Ok(())
    }
}
