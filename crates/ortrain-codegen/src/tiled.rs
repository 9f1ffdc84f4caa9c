//! Products by tiles: a group computes a square of the product, and shares what it loads of the factors.

use ortrain_expr::Scalar;

use crate::dialect::{GROUP, Repr, SHARED};
use crate::inner_product::{InnerProduct, LEFT, RIGHT, element_where, terms};
use crate::kernel::{Kernel, Value};
use crate::launch::Launch;
use crate::lower::Context;
use crate::split_k::{MatmulOutput, Split};
use crate::thread_index::coordinates;

/// Invocations along each axis of a tile.
const ACROSS: usize = 16;
const LANES: usize = GROUP as usize;
/// The names of floats that are one value.
const PARTS: [&str; 4] = ["x", "y", "z", "w"];
/// Groups of large tiles that keep a device busy; with fewer, tiles are small.
const BUSY: usize = 128;
/// Groups of the largest tiles that do: each has so many values that few groups run at once.
const BUSY_LARGEST: usize = 256;

/// The sizes of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    /// Rows and columns of the product.
    side: usize,
    /// Terms that are shared at once.
    depth: usize,
    /// Terms that are added without asking whether there are more.
    unrolled: usize,
    split: Split,
}

impl Tile {
    fn of(batch: usize, [m, n, k]: [usize; 3], parts: usize) -> Tile {
        let of_side = |side: usize, depth: usize, unrolled: usize| {
            let groups = batch * m.div_ceil(side) * n.div_ceil(side);
            let split = Split::of(groups, k, depth);
            (Tile { side, depth, unrolled, split }, groups * split.count)
        };
        // The largest tiles may cover an eighth more than large ones do.
        let covered = |side: usize| m.next_multiple_of(side) * n.next_multiple_of(side);
        let (largest, groups) = of_side(128, 8, 8);
        if parts == 1 && groups >= BUSY_LARGEST && 8 * covered(128) <= 9 * covered(64) {
            return largest;
        }
        // Several terms of factors need as much room as more of them.
        let (large, groups) = of_side(64, if parts > 1 { 8 } else { 16 }, 4);
        if m.min(n) <= 32 || groups < BUSY { of_side(32, 16, 4).0 } else { large }
    }

    /// Rows and columns that an invocation has.
    fn each(self) -> usize {
        self.side / ACROSS
    }

    /// Rows, or columns, of an invocation that are one value.
    fn width(self) -> usize {
        self.each().min(PARTS.len())
    }

    /// Values of an invocation along an axis.
    fn values(self) -> usize {
        self.each() / self.width()
    }

    /// Values along an axis of the tile. Their first floats are rows or columns that lie side by side; the second ones lie so
    /// many further, and so on.
    fn stride(self) -> usize {
        self.values() * ACROSS
    }

    /// Values of a row of a shared factor: one more than there are, so that a column lies in different banks.
    fn pitch(self) -> usize {
        self.stride() + 1
    }

    /// The type of a value of the shared array.
    fn repr(self) -> Repr {
        Repr::floats(self.width())
    }

    /// Rows of an invocation that are stored at once: as many as the shared array has room for.
    fn stored(self) -> usize {
        self.each().min(SHARED / (ACROSS * self.side * size_of::<f32>()))
    }
}

/// The launches of a product by tiles.
pub(crate) fn launches(cx: &Context<'_>, target: &MatmulOutput<'_>) -> Result<Vec<Launch>, String> {
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
    target: &'t MatmulOutput<'t>,
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

/// The sums of an invocation: those of each of its rows, by values of columns.
type Sums = Vec<Vec<InnerProduct>>;

impl Printer<'_> {
    fn launch(&self, cx: &Context<'_>) -> Result<Launch, String> {
        let (factors, tile) = (self.target.factors, self.tile);
        let Tile { side, depth, split, .. } = tile;
        let [m, n, _] = factors.sides();
        let batch = factors.batch();
        let mut kernel = cx.group_kernel();
        let grid = [split.count, m.div_ceil(side), n.div_ceil(side)];
        let dims: Vec<usize> = batch.iter().copied().chain(grid).collect();
        let mut at = coordinates(&mut kernel, "group", &dims);
        let place = at.split_off(batch.len());
        let first = [1, 2].map(|axis| kernel.int(format!("{} * {side}", place[axis])));
        let room = (2 * self.parts * depth * tile.pitch()).max(tile.stored() * ACROSS * tile.stride());
        let shared = kernel.shared(tile.repr(), room);
        let group = Group { batch: at, part: place[0].clone(), first, shared };
        let sums = self.sums(&mut kernel, &group)?;
        self.store(&mut kernel, &group, &sums)?;
        cx.finish_groups(kernel, dims.iter().map(|&dim| dim as u64).product())
    }

    /// The place of a part of a factor in the shared array: a term of all lines of a value.
    fn place(&self, side: usize, part: usize, line: &str, term: &str) -> String {
        let start = (side * self.parts + part) * self.tile.depth * self.tile.pitch();
        format!("{start} + ({term}) * {} + {line}", self.tile.pitch())
    }

    /// The share of a factor that an invocation loads: neighbours load neighbours.
    fn loads(&self, kernel: &mut Kernel<'_>, group: &Group, side: usize) -> Loads {
        let (factors, tile) = (self.target.factors, self.tile);
        let along = factors.runs_along_terms(side);
        let fast = if along { tile.depth } else { tile.stride() };
        let (near, far) = (kernel.int(format!("lane % {fast}")), kernel.int(format!("lane / {fast}")));
        let place = if along { [far, near] } else { [near, far] };
        let all = factors.sides()[side];
        let line = |k: usize| {
            let line = kernel.int(format!("{} + {} + {}", group.first[side], place[0], k * tile.stride()));
            let exists = (!all.is_multiple_of(tile.side)).then(|| format!("{line} < {all}"));
            (factors.line(kernel, side, &group.batch, &line), exists)
        };
        let lines = (0..tile.width()).map(line).collect();
        Loads { side, place, lines }
    }

    /// The condition under which an invocation loads anything.
    fn has_share(&self) -> Option<String> {
        let lanes = self.tile.stride() * self.tile.depth;
        (lanes < LANES).then(|| format!("lane < {lanes}"))
    }

    /// Loads elements of a factor from a term on; for each part, `to` takes what becomes one value of the shared array.
    fn fetch(&self, kernel: &mut Kernel<'_>, loads: &Loads, from: &str, to: &[Value]) -> Result<(), String> {
        let (factors, Tile { split, .. }) = (self.target.factors, self.tile);
        let all = factors.sides()[2];
        let term = kernel.int(format!("{from} + {}", loads.place[1]));
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
        for (to, values) in to.iter().zip(&values) {
            let value = Value::new(kernel.dialect.floats(to.repr, values), to.repr);
            kernel.assign(to, &value);
        }
        Ok(())
    }

    /// The sums of an invocation. While those of some terms are added, the next terms are on their way.
    fn sums(&self, kernel: &mut Kernel<'_>, group: &Group) -> Result<Sums, String> {
        let (tile, repr) = (self.tile, self.tile.repr());
        let Tile { depth, split, .. } = tile;
        let precision = self.target.factors.precision();
        let of_row = |_| (0..tile.values()).map(|_| InnerProduct::of(kernel, precision, repr)).collect();
        let sums: Sums = (0..tile.each()).map(of_row).collect();
        let loads = [LEFT, RIGHT].map(|side| self.loads(kernel, group, side));
        let own = self.own(kernel);
        let zero = kernel.constant(Scalar::F32(0.0), repr);
        let fetched: Vec<Vec<Value>> =
            loads.iter().map(|_| (0..self.parts).map(|_| kernel.variable(&zero)).collect()).collect();
        let turns = split.terms / depth;
        let open = kernel.depth();
        let turn = kernel.counted("0", &(turns + 1).to_string());
        let inner = kernel.depth();
        let is_more: Vec<String> =
            [Some(format!("{turn} < {turns}")), self.has_share()].into_iter().flatten().collect();
        let is_more = is_more.join(" && ");
        kernel.when(&is_more);
        let from = kernel.int(format!("{} * {} + {turn} * {depth}", group.part, split.terms));
        for (loads, to) in loads.iter().zip(&fetched) {
            self.fetch(kernel, loads, &from, to)?;
        }
        kernel.close_to(inner);
        kernel.when(&format!("{turn} > 0"));
        self.add(kernel, group, &own, &sums);
        kernel.close_to(inner);
        kernel.barrier();
        kernel.when(&is_more);
        for (loads, fetched) in loads.iter().zip(&fetched) {
            for (part, value) in fetched.iter().enumerate() {
                let to = self.place(loads.side, part, &loads.place[0], &loads.place[1]);
                kernel.line(&format!("{}[{to}] = {};", group.shared, value.text));
            }
        }
        kernel.close_to(inner);
        kernel.barrier();
        kernel.close_to(open);
        Ok(sums)
    }

    /// Adds what the shared array has.
    fn add(&self, kernel: &mut Kernel<'_>, group: &Group, own: &[String; 2], sums: &Sums) {
        let tile = self.tile;
        let open = kernel.depth();
        let first = match tile.depth / tile.unrolled {
            1 => None,
            turns => Some(kernel.counted("0", &turns.to_string())),
        };
        for k in 0..tile.unrolled {
            let term = match &first {
                None => k.to_string(),
                Some(turn) => format!("{turn} * {} + {k}", tile.unrolled),
            };
            let factors = [LEFT, RIGHT].map(|side| -> Vec<Vec<Value>> {
                let mut value = |number: usize, part: usize| {
                    let line = format!("{} + {}", own[side], number * ACROSS);
                    let place = self.place(side, part, &line, &term);
                    kernel.define(Value::new(format!("{}[{place}]", group.shared), tile.repr()))
                };
                (0..tile.values())
                    .map(|number| (0..self.parts).map(|part| value(number, part)).collect())
                    .collect()
            });
            for (number, row) in sums.iter().enumerate() {
                let name = PARTS[number % tile.width()];
                let of_row = |part: &Value| Value::new(format!("{}.{name}", part.text), Repr::F32);
                let left: Vec<Value> = factors[LEFT][number / tile.width()].iter().map(of_row).collect();
                row.iter().zip(&factors[RIGHT]).for_each(|(sum, right)| sum.add_terms(kernel, &left, right));
            }
        }
        kernel.close_to(open);
    }

    /// The first row and the first column of an invocation in the tile.
    fn own(&self, kernel: &mut Kernel<'_>) -> [String; 2] {
        [kernel.int(format!("lane / {ACROSS}")), kernel.int(format!("lane % {ACROSS}"))]
    }

    /// Hands the sums on, some rows at a time, through the shared array: neighbours then have neighbouring columns of one row.
    fn store(&self, kernel: &mut Kernel<'_>, group: &Group, sums: &Sums) -> Result<(), String> {
        let tile = self.tile;
        let is_whole = tile.split.count == 1;
        // What goes on: the values of each row.
        let results: Vec<Vec<Vec<String>>> = match is_whole {
            true => {
                let of_row =
                    |row: &Vec<InnerProduct>| row.iter().map(|sums| self.results(kernel, sums)).collect();
                vec![sums.iter().map(of_row).collect()]
            }
            false => {
                let of_row = |row: &Vec<InnerProduct>, number: usize| {
                    row.iter()
                        .filter_map(|sums| sums.sums().nth(number))
                        .map(|sum| sum.text.clone())
                        .collect()
                };
                let count = sums[0][0].sums().count();
                (0..count).map(|number| sums.iter().map(|row| of_row(row, number)).collect()).collect()
            }
        };
        let own = self.own(kernel);
        let turns = tile.each() / tile.stored();
        for (number, rows) in results.iter().enumerate() {
            if number > 0 {
                kernel.barrier();
            }
            let open = kernel.depth();
            let turn = (turns > 1).then(|| kernel.counted("0", &turns.to_string()));
            let inner = kernel.depth();
            for (k, rows) in rows.chunks(tile.stored()).enumerate() {
                if let Some(turn) = &turn {
                    kernel.when(&format!("{turn} == {k}"));
                }
                for (k, row) in rows.iter().enumerate() {
                    let first =
                        format!("({} + {}) * {} + {}", own[LEFT], k * ACROSS, tile.stride(), own[RIGHT]);
                    for (k, value) in row.iter().enumerate() {
                        kernel.line(&format!("{}[{first} + {}] = {value};", group.shared, k * ACROSS));
                    }
                }
                kernel.close_to(inner);
            }
            kernel.barrier();
            self.store_shared(kernel, group, (is_whole, number), turn.as_deref())?;
            if turn.is_some() {
                kernel.barrier();
            }
            kernel.close_to(open);
        }
        Ok(())
    }

    /// The results of inner products side by side.
    fn results(&self, kernel: &Kernel<'_>, sums: &InnerProduct) -> String {
        let names = &PARTS[..self.tile.width()];
        let parts: Vec<String> = names.iter().map(|name| sums.part(name).result(kernel).text).collect();
        kernel.dialect.floats(self.tile.repr(), &parts)
    }

    /// Finishes, or leaves, the rows that the shared array has: those of a turn.
    fn store_shared(
        &self,
        kernel: &mut Kernel<'_>,
        group: &Group,
        (is_whole, number): (bool, usize),
        turn: Option<&str>,
    ) -> Result<(), String> {
        let (target, tile) = (self.target, self.tile);
        let side = tile.side;
        let sides = target.factors.sides();
        let depth = kernel.depth();
        let k = kernel.counted("0", &(tile.stored() * ACROSS * side / LANES).to_string());
        let element = kernel.int(format!("lane + {k} * {LANES}"));
        let (row, column) =
            (kernel.int(format!("{element} / {side}")), kernel.int(format!("{element} % {side}")));
        let in_tile = match turn {
            // All rows of the tile, in their order.
            None => row.clone(),
            Some(turn) => {
                let own = kernel.int(format!("{turn} * {} + {row} / {ACROSS}", tile.stored()));
                let start =
                    format!("{own} / {0} * {ACROSS} + {own} % {0} * {1}", tile.width(), tile.stride());
                format!("{start} + {row} % {ACROSS}")
            }
        };
        let i = kernel.int(format!("{} + {in_tile}", group.first[LEFT]));
        let j = kernel.int(format!("{} + {column}", group.first[RIGHT]));
        let inside: Vec<String> = [(&i, sides[LEFT]), (&j, sides[RIGHT])]
            .into_iter()
            .filter(|(_, size)| !size.is_multiple_of(side))
            .map(|(at, size)| format!("{at} < {size}"))
            .collect();
        kernel.when_live((!inside.is_empty()).then(|| inside.join(" && ")));
        let at = target.factors.point(kernel, &group.batch, [&i, &j]);
        let stride = tile.stride();
        let place = format!("{row} * {stride} + {column} % {stride}");
        let value = kernel.dialect.part_of(&group.shared, &place, &format!("{column} / {stride}"));
        let value = kernel.define(Value::new(value, Repr::F32));
        match is_whole {
            true => target.finish(kernel, at, value)?,
            false => target.leave(kernel, &at, &group.part, (number, &value)),
        }
        kernel.close_to(depth);
        Ok(())
    }
}
