//! Products by tiles: a group computes a square of the product, and shares what it loads of the factors.

use crate::dialect::{GROUP, Repr};
use crate::kernel::{Kernel, Value};
use crate::launch::Launch;
use crate::lower::Context;
use crate::points::coordinates;
use crate::product::{InnerProduct, LEFT, RIGHT, element_where, int, terms};
use crate::split::{Split, Target};

/// Invocations along each axis of a tile.
const ACROSS: usize = 16;
const LANES: usize = GROUP as usize;
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

    /// Elements of a row of a shared factor: one more than a tile has, so that a column lies in different banks.
    fn pitch(self) -> usize {
        self.side + 1
    }

    /// Rows and columns that an invocation has.
    fn each(self) -> usize {
        self.side / ACROSS
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

/// Elements of a factor that an invocation loads: places in the tile, along the line and along the terms.
struct Loads {
    side: usize,
    places: Vec<[String; 2]>,
    /// What elements of the lines share, and where there are such; the last one stands for all others, too.
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
        let first = [1, 2].map(|axis| int(&mut kernel, format!("{} * {side}", place[axis])));
        let room = (2 * self.parts * depth * self.tile.pitch()).max(side * side);
        let shared = kernel.shared(Repr::F32, room);
        let group = Group { batch: at, part: place[0].clone(), first, shared };
        let sums = self.sums(&mut kernel, &group)?;
        self.store(&mut kernel, &group, &sums)?;
        cx.finish_groups(kernel, dims.iter().map(|&dim| dim as u64).product())
    }

    /// Where a term of an element of a factor lies in the shared array.
    fn place(&self, side: usize, part: usize, line: &str, term: &str) -> String {
        let pitch = self.tile.pitch();
        let start = (side * self.parts + part) * self.tile.depth * pitch;
        format!("{start} + {term} * {pitch} + {line}")
    }

    /// What an invocation loads of a factor: neighbours load neighbours.
    fn loads(&self, kernel: &mut Kernel<'_>, group: &Group, side: usize) -> Loads {
        let (factors, Tile { side: size, depth, .. }) = (self.target.factors, self.tile);
        let along = factors.runs_along_terms(side);
        let fast = if along { depth } else { size };
        let near = int(kernel, format!("lane % {fast}"));
        let far = int(kernel, format!("lane / {fast}"));
        let count = size * depth / LANES;
        let step = LANES / fast;
        let fars: Vec<String> = (0..count).map(|k| int(kernel, format!("{far} + {}", k * step))).collect();
        let places: Vec<[String; 2]> = fars
            .iter()
            .map(|far| if along { [far.clone(), near.clone()] } else { [near.clone(), far.clone()] })
            .collect();
        let lines = if along { &fars[..] } else { std::slice::from_ref(&near) };
        let sides = factors.sides();
        let lines = lines
            .iter()
            .map(|line| {
                let line = int(kernel, format!("{} + {line}", group.first[side]));
                let exists = (!sides[side].is_multiple_of(size)).then(|| format!("{line} < {}", sides[side]));
                (factors.line(kernel, side, &group.batch, &line), exists)
            })
            .collect();
        Loads { side, places, lines }
    }

    /// Loads elements of a factor from a term on into the shared array.
    fn share(&self, kernel: &mut Kernel<'_>, group: &Group, loads: &Loads, from: &str) -> Result<(), String> {
        let factors = self.target.factors;
        let Split { count, terms: part_terms } = self.tile.split;
        let [_, _, all] = factors.sides();
        let mut known: Option<(String, Vec<String>, Option<String>)> = None;
        for (k, [line_place, place]) in loads.places.iter().enumerate() {
            let (line, exists) = &loads.lines[k.min(loads.lines.len() - 1)];
            if known.as_ref().is_none_or(|(of, ..)| of != place) {
                let term = int(kernel, format!("{from} + {place}"));
                let is_term = (count * part_terms != all).then(|| format!("{term} < {all}"));
                known = Some((place.clone(), factors.term(kernel, loads.side, &term), is_term));
            }
            let Some((_, term, is_term)) = &known else { continue };
            let conditions: Vec<&str> = [exists, is_term].into_iter().flatten().map(String::as_str).collect();
            let condition = (!conditions.is_empty()).then(|| conditions.join(" && "));
            let value = element_where(kernel, factors, loads.side, condition.as_deref(), [line, term])?;
            for (part, value) in terms(kernel, factors.precision(), value).iter().enumerate() {
                let to = self.place(loads.side, part, line_place, place);
                kernel.line(&format!("{}[{to}] = {};", group.shared, value.text));
            }
        }
        Ok(())
    }

    /// The sums of each row and column that an invocation has.
    fn sums(&self, kernel: &mut Kernel<'_>, group: &Group) -> Result<Vec<InnerProduct>, String> {
        let (Tile { depth, split, .. }, each) = (self.tile, self.tile.each());
        let precision = self.target.factors.precision();
        let sums: Vec<InnerProduct> =
            (0..each * each).map(|_| InnerProduct::new(kernel, precision)).collect();
        let loads = [LEFT, RIGHT].map(|side| self.loads(kernel, group, side));
        let own = self.own(kernel);
        let open = kernel.depth();
        let step = kernel.counted("0", &(split.terms / depth).to_string());
        let from = int(kernel, format!("{} * {} + {step} * {depth}", group.part, split.terms));
        for loads in &loads {
            self.share(kernel, group, loads, &from)?;
        }
        kernel.barrier();
        let inner = kernel.depth();
        let term = kernel.counted("0", &depth.to_string());
        let factors = [LEFT, RIGHT].map(|side| -> Vec<Vec<Value>> {
            let line = |k: usize| format!("{} + {}", own[side], k * ACROSS);
            let place = |k, part| format!("{}[{}]", group.shared, self.place(side, part, &line(k), &term));
            let element = |k, part| Value::new(place(k, part), Repr::F32);
            (0..each).map(|k| (0..self.parts).map(|part| kernel.define(element(k, part))).collect()).collect()
        });
        for (k, sum) in sums.iter().enumerate() {
            sum.add_terms(kernel, &factors[LEFT][k / each], &factors[RIGHT][k % each]);
        }
        kernel.close_to(inner);
        kernel.barrier();
        kernel.close_to(open);
        Ok(sums)
    }

    /// The first row and the first column of an invocation in the tile.
    fn own(&self, kernel: &mut Kernel<'_>) -> [String; 2] {
        [int(kernel, format!("lane / {ACROSS}")), int(kernel, format!("lane % {ACROSS}"))]
    }

    /// Hands the sums on, through the shared array: neighbours then have neighbouring columns of one row.
    fn store(&self, kernel: &mut Kernel<'_>, group: &Group, sums: &[InnerProduct]) -> Result<(), String> {
        let is_whole = self.tile.split.count == 1;
        let results: Vec<Vec<Value>> = match is_whole {
            true => vec![sums.iter().map(|sum| sum.result(kernel)).collect()],
            false => (0..sums[0].sums().count())
                .map(|number| sums.iter().filter_map(|sum| sum.sums().nth(number).cloned()).collect())
                .collect(),
        };
        let (Tile { side, .. }, each) = (self.tile, self.tile.each());
        let own = self.own(kernel);
        for (number, values) in results.iter().enumerate() {
            if number > 0 {
                kernel.barrier();
            }
            for (k, value) in values.iter().enumerate() {
                let (row, column) = (k / each * ACROSS, k % each * ACROSS);
                let place = format!("({} + {row}) * {side} + {} + {column}", own[0], own[1]);
                kernel.line(&format!("{}[{place}] = {};", group.shared, value.text));
            }
            kernel.barrier();
            self.store_shared(kernel, group, is_whole, number)?;
        }
        Ok(())
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
        let element = int(kernel, format!("lane + {k} * {LANES}"));
        let [i, j] = [("/", LEFT), ("%", RIGHT)]
            .map(|(sign, axis)| int(kernel, format!("{} + {element} {sign} {side}", group.first[axis])));
        let inside: Vec<String> = [(&i, sides[LEFT]), (&j, sides[RIGHT])]
            .into_iter()
            .filter(|(_, size)| !size.is_multiple_of(side))
            .map(|(at, size)| format!("{at} < {size}"))
            .collect();
        kernel.when_live((!inside.is_empty()).then(|| inside.join(" && ")));
        let at = target.factors.point(kernel, &group.batch, [&i, &j]);
        let value = kernel.define(Value::new(format!("{}[{element}]", group.shared), Repr::F32));
        match is_whole {
            true => target.finish(kernel, at, value)?,
            false => target.leave(kernel, &at, &group.part, (number, &value)),
        }
        kernel.close_to(depth);
        Ok(())
    }
}
