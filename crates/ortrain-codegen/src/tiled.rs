//! Code generation for tiled matrix products.
//!
//! A group of invocations computes a square tile of the product. It loads the tile's rows and columns of the factors
//! into shared memory, so that each element is loaded once per group.

use ortrain_expr::Scalar;

use crate::context::Context;
use crate::dialect::{GROUP_SIZE, MAX_SHARED_BYTES};
use crate::inner_product::{InnerProduct, LEFT, RIGHT, element_if, split_terms};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::repr::{Repr, Value};
use crate::split_k::{MatmulOutput, Split};
use crate::thread_index::define_coordinates;

/// Number of invocations along each axis of a tile.
const LANES_PER_AXIS: usize = 16;
const LANES: usize = GROUP_SIZE as usize;
/// Names of the components of a vector.
const COMPONENTS: [&str; 4] = ["x", "y", "z", "w"];
/// Minimum number of groups of large tiles that keep a device busy; with fewer, tiles are small.
const MIN_LARGE_TILES: usize = 128;
/// Minimum number of groups for the largest tiles. They use more registers, so fewer groups run at once.
const MIN_LARGEST_TILES: usize = 256;

/// Tile sizes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    /// Number of rows, and of columns, of the product per group.
    side: usize,
    /// Number of terms in shared memory at once.
    depth: usize,
    /// Number of terms per unrolled iteration.
    unrolled: usize,
    split: Split,
}

impl Tile {
    /// Chooses the tile for a batch of products. `parts`: number of terms into which the precision splits an element.
    fn for_product(batch: usize, [m, n, k]: [usize; 3], parts: usize) -> Tile {
        let of_side = |side: usize, depth: usize, unrolled: usize| {
            let groups = batch * m.div_ceil(side) * n.div_ceil(side);
            let split = Split::for_sums(groups, k, depth);
            (Tile { side, depth, unrolled, split }, groups * split.count)
        };
        // The largest tiles may cover at most an eighth more elements than large tiles.
        let covered = |side: usize| m.next_multiple_of(side) * n.next_multiple_of(side);
        let (largest, groups) = of_side(128, 8, 8);
        if parts == 1 && groups >= MIN_LARGEST_TILES && 8 * covered(128) <= 9 * covered(64) {
            return largest;
        }
        // Elements that are split into several terms need more shared memory, so the depth is smaller.
        let (large, groups) = of_side(64, if parts > 1 { 8 } else { 16 }, 4);
        if m.min(n) <= 32 || groups < MIN_LARGE_TILES { of_side(32, 16, 4).0 } else { large }
    }

    /// Returns the number of rows and columns per invocation.
    fn lines_per_lane(self) -> usize {
        self.side / LANES_PER_AXIS
    }

    /// Returns the number of rows, or columns, of an invocation in one vector.
    fn vector_width(self) -> usize {
        self.lines_per_lane().min(COMPONENTS.len())
    }

    /// Returns the number of vectors per invocation along an axis.
    fn vectors_per_lane(self) -> usize {
        self.lines_per_lane() / self.vector_width()
    }

    /// Returns the number `n` of vectors along an axis of the tile. The components of vector `i` are the rows or
    /// columns `i`, `i + n`, `i + 2n` and so on.
    fn vectors_per_axis(self) -> usize {
        self.vectors_per_lane() * LANES_PER_AXIS
    }

    /// Returns the distance between consecutive terms in the shared array, in vectors. The extra vector avoids bank
    /// conflicts if adjacent invocations store consecutive terms.
    fn pitch(self) -> usize {
        self.vectors_per_axis() + 1
    }

    /// Returns the type of an element of the shared array.
    fn repr(self) -> Repr {
        Repr::floats(self.vector_width())
    }

    /// Returns the number of result rows per invocation that fit in shared memory at once.
    fn rows_per_store(self) -> usize {
        self.lines_per_lane().min(MAX_SHARED_BYTES / (LANES_PER_AXIS * self.side * size_of::<f32>()))
    }
}

/// Returns the launches of a tiled product.
pub(crate) fn launches(cx: &Context<'_>, target: &MatmulOutput<'_>) -> Result<Vec<Launch>, String> {
    let factors = target.factors;
    let parts = factors.precision().terms();
    let tile = Tile::for_product(factors.batch().iter().product(), factors.sides(), parts);
    target.reserve(cx, tile.split);
    let mut launches = vec![Printer { target, tile, parts }.launch(cx)?];
    if tile.split.count > 1 {
        launches.push(target.add_parts_launch(cx, tile.split)?);
    }
    Ok(launches)
}

/// Generator of the kernel of a tiled product.
struct Printer<'t> {
    target: &'t MatmulOutput<'t>,
    tile: Tile,
    /// Number of terms into which the precision splits an element of a factor.
    parts: usize,
}

/// Expressions for the work of a group: batch index, split-K part, and tile of the product.
struct Group {
    batch: Vec<String>,
    part: String,
    /// First row and first column of the tile.
    first: [String; 2],
    /// Name of the array in shared memory.
    shared: String,
}

/// Elements of a factor that an invocation loads: one term of a few lines at a time. A line is a row of the left factor
/// or a column of the right one.
struct Loads {
    side: usize,
    /// Index of the vector of lines in the tile, and index of the term in the tile.
    tile_position: [String; 2],
    /// For each line, the values that its elements share, and the condition that the line exists (`None`: always).
    lines: Vec<(Vec<String>, Option<String>)>,
}

/// Sums of an invocation, for each of its rows and each vector of columns.
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
        let mut at = define_coordinates(&mut kernel, "group", &dims);
        let position = at.split_off(batch.len());
        let first = [1, 2].map(|axis| kernel.int(format!("{} * {side}", position[axis])));
        let shared_len = (2 * self.parts * depth * tile.pitch())
            .max(tile.rows_per_store() * LANES_PER_AXIS * tile.vectors_per_axis());
        let shared = kernel.shared(tile.repr(), shared_len);
        let group = Group { batch: at, part: position[0].clone(), first, shared };
        let sums = self.sums(&mut kernel, &group)?;
        self.store(&mut kernel, &group, &sums)?;
        cx.finish_groups(kernel, dims.iter().map(|&dim| dim as u64).product())
    }

    /// Returns the index of a vector in the shared array: vector `line` of factor `side` at a term. `part` is the
    /// index among the terms into which the precision splits an element.
    fn shared_index(&self, side: usize, part: usize, line: &str, term: &str) -> String {
        let start = (side * self.parts + part) * self.tile.depth * self.tile.pitch();
        format!("{start} + ({term}) * {} + {line}", self.tile.pitch())
    }

    /// Defines which elements of a factor an invocation loads. Adjacent invocations load adjacent elements.
    fn define_loads(&self, kernel: &mut Kernel<'_>, group: &Group, side: usize) -> Loads {
        let (factors, tile) = (self.target.factors, self.tile);
        let along = factors.runs_along_terms(side);
        let fast = if along { tile.depth } else { tile.vectors_per_axis() };
        let (fast_index, outer_index) =
            (kernel.int(format!("lane % {fast}")), kernel.int(format!("lane / {fast}")));
        let position = if along { [outer_index, fast_index] } else { [fast_index, outer_index] };
        let line_count = factors.sides()[side];
        let line = |k: usize| {
            let line = kernel.int(format!(
                "{} + {} + {}",
                group.first[side],
                position[0],
                k * tile.vectors_per_axis()
            ));
            let exists = (!line_count.is_multiple_of(tile.side)).then(|| format!("{line} < {line_count}"));
            (factors.define_line(kernel, side, &group.batch, &line), exists)
        };
        let lines = (0..tile.vector_width()).map(line).collect();
        Loads { side, tile_position: position, lines }
    }

    /// Returns the condition for the invocations that load elements; `None` if all invocations load.
    fn load_condition(&self) -> Option<String> {
        let lanes = self.tile.vectors_per_axis() * self.tile.depth;
        (lanes < LANES).then(|| format!("lane < {lanes}"))
    }

    /// Loads the invocation's vector of a factor. The terms in the tile start at term `from`. `to` receives one vector
    /// for each term into which the precision splits the elements.
    fn fetch(&self, kernel: &mut Kernel<'_>, loads: &Loads, from: &str, to: &[Value]) -> Result<(), String> {
        let (factors, Tile { split, .. }) = (self.target.factors, self.tile);
        let term_count = factors.sides()[2];
        let term = kernel.int(format!("{from} + {}", loads.tile_position[1]));
        let is_term = (split.count * split.terms != term_count).then(|| format!("{term} < {term_count}"));
        let term = factors.define_term(kernel, loads.side, &term);
        let mut values: Vec<Vec<String>> = vec![Vec::new(); self.parts];
        for (line, exists) in &loads.lines {
            let conditions: Vec<&str> =
                [exists, &is_term].into_iter().flatten().map(String::as_str).collect();
            let condition = (!conditions.is_empty()).then(|| conditions.join(" && "));
            let value = element_if(kernel, factors, loads.side, condition.as_deref(), [line, &term])?;
            let parts = split_terms(kernel, factors.precision(), value);
            values.iter_mut().zip(parts).for_each(|(values, part)| values.push(part.text));
        }
        for (to, values) in to.iter().zip(&values) {
            let value = Value::new(kernel.dialect.floats(to.repr, values), to.repr);
            kernel.assign(to, &value);
        }
        Ok(())
    }

    /// Prints the sums of an invocation. Loads of the next terms overlap with the additions of the current terms.
    fn sums(&self, kernel: &mut Kernel<'_>, group: &Group) -> Result<Sums, String> {
        let (tile, repr) = (self.tile, self.tile.repr());
        let Tile { depth, split, .. } = tile;
        let precision = self.target.factors.precision();
        let of_row = |_| {
            (0..tile.vectors_per_lane()).map(|_| InnerProduct::with_repr(kernel, precision, repr)).collect()
        };
        let sums: Sums = (0..tile.lines_per_lane()).map(of_row).collect();
        let loads = [LEFT, RIGHT].map(|side| self.define_loads(kernel, group, side));
        let own_lines = self.first_lines(kernel);
        let zero = kernel.constant(Scalar::F32(0.0), repr);
        let fetched: Vec<Vec<Value>> =
            loads.iter().map(|_| (0..self.parts).map(|_| kernel.variable(&zero)).collect()).collect();
        let turns = split.terms / depth;
        let open = kernel.depth();
        let turn = kernel.begin_loop("0", &(turns + 1).to_string());
        let inner = kernel.depth();
        let has_next: Vec<String> =
            [Some(format!("{turn} < {turns}")), self.load_condition()].into_iter().flatten().collect();
        let has_next_text = has_next.join(" && ");
        kernel.begin_if(&has_next_text);
        let from = kernel.int(format!("{} * {} + {turn} * {depth}", group.part, split.terms));
        for (loads, to) in loads.iter().zip(&fetched) {
            self.fetch(kernel, loads, &from, to)?;
        }
        kernel.close_to(inner);
        kernel.begin_if(&format!("{turn} > 0"));
        self.add(kernel, group, &own_lines, &sums);
        kernel.close_to(inner);
        kernel.barrier();
        kernel.begin_if(&has_next_text);
        for (loads, fetched) in loads.iter().zip(&fetched) {
            for (part, value) in fetched.iter().enumerate() {
                let to =
                    self.shared_index(loads.side, part, &loads.tile_position[0], &loads.tile_position[1]);
                kernel.line(&format!("{}[{to}] = {};", group.shared, value.text));
            }
        }
        kernel.close_to(inner);
        kernel.barrier();
        kernel.close_to(open);
        Ok(sums)
    }

    /// Adds the products of the terms in the shared array.
    fn add(&self, kernel: &mut Kernel<'_>, group: &Group, first_lines: &[String; 2], sums: &Sums) {
        let tile = self.tile;
        let open = kernel.depth();
        let first = match tile.depth / tile.unrolled {
            1 => None,
            turns => Some(kernel.begin_loop("0", &turns.to_string())),
        };
        for k in 0..tile.unrolled {
            let term = match &first {
                None => k.to_string(),
                Some(turn) => format!("{turn} * {} + {k}", tile.unrolled),
            };
            let factors = [LEFT, RIGHT].map(|side| -> Vec<Vec<Value>> {
                let mut value = |vector: usize, part: usize| {
                    let line = format!("{} + {}", first_lines[side], vector * LANES_PER_AXIS);
                    let offset = self.shared_index(side, part, &line, &term);
                    kernel.define(Value::new(format!("{}[{offset}]", group.shared), tile.repr()))
                };
                (0..tile.vectors_per_lane())
                    .map(|vector| (0..self.parts).map(|part| value(vector, part)).collect())
                    .collect()
            });
            for (vector, row) in sums.iter().enumerate() {
                let name = COMPONENTS[vector % tile.vector_width()];
                let of_row = |part: &Value| Value::new(format!("{}.{name}", part.text), Repr::F32);
                let left: Vec<Value> =
                    factors[LEFT][vector / tile.vector_width()].iter().map(of_row).collect();
                row.iter().zip(&factors[RIGHT]).for_each(|(sum, right)| sum.add_terms(kernel, &left, right));
            }
        }
        kernel.close_to(open);
    }

    /// Defines the first row and the first column of an invocation in the tile.
    fn first_lines(&self, kernel: &mut Kernel<'_>) -> [String; 2] {
        [kernel.int(format!("lane / {LANES_PER_AXIS}")), kernel.int(format!("lane % {LANES_PER_AXIS}"))]
    }

    /// Writes the results to the epilogue, or the sums as split-K parts to scratch memory. Some rows at a time pass
    /// through the shared array, so that adjacent invocations write adjacent columns of a row.
    fn store(&self, kernel: &mut Kernel<'_>, group: &Group, sums: &Sums) -> Result<(), String> {
        let tile = self.tile;
        let is_unsplit = tile.split.count == 1;
        // For each sum of an inner product: the vectors of each row.
        let results: Vec<Vec<Vec<String>>> = match is_unsplit {
            true => {
                let of_row =
                    |row: &Vec<InnerProduct>| row.iter().map(|sums| self.results(kernel, sums)).collect();
                vec![sums.iter().map(of_row).collect()]
            }
            false => {
                let of_row = |row: &Vec<InnerProduct>, index: usize| {
                    row.iter().filter_map(|sums| sums.sums().nth(index)).map(|sum| sum.text.clone()).collect()
                };
                let count = sums[0][0].sums().count();
                (0..count).map(|index| sums.iter().map(|row| of_row(row, index)).collect()).collect()
            }
        };
        let own_lines = self.first_lines(kernel);
        let turns = tile.lines_per_lane() / tile.rows_per_store();
        for (index, rows) in results.iter().enumerate() {
            if index > 0 {
                kernel.barrier();
            }
            let open = kernel.depth();
            let turn = (turns > 1).then(|| kernel.begin_loop("0", &turns.to_string()));
            let inner = kernel.depth();
            for (k, rows) in rows.chunks(tile.rows_per_store()).enumerate() {
                if let Some(turn) = &turn {
                    kernel.begin_if(&format!("{turn} == {k}"));
                }
                for (k, row) in rows.iter().enumerate() {
                    let first = format!(
                        "({} + {}) * {} + {}",
                        own_lines[LEFT],
                        k * LANES_PER_AXIS,
                        tile.vectors_per_axis(),
                        own_lines[RIGHT]
                    );
                    for (k, value) in row.iter().enumerate() {
                        kernel.line(&format!(
                            "{}[{first} + {}] = {value};",
                            group.shared,
                            k * LANES_PER_AXIS
                        ));
                    }
                }
                kernel.close_to(inner);
            }
            kernel.barrier();
            self.store_shared(kernel, group, (is_unsplit, index), turn.as_deref())?;
            if turn.is_some() {
                kernel.barrier();
            }
            kernel.close_to(open);
        }
        Ok(())
    }

    /// Returns the results of the inner products of a vector.
    fn results(&self, kernel: &Kernel<'_>, sums: &InnerProduct) -> String {
        let names = &COMPONENTS[..self.tile.vector_width()];
        let parts: Vec<String> = names.iter().map(|name| sums.component(name).result(kernel).text).collect();
        kernel.dialect.floats(self.tile.repr(), &parts)
    }

    /// Finishes the rows in the shared array, or stores them as split-K part of sum `number`. `turn` is the iteration
    /// over the rows of an invocation.
    fn store_shared(
        &self,
        kernel: &mut Kernel<'_>,
        group: &Group,
        (is_unsplit, number): (bool, usize),
        turn: Option<&str>,
    ) -> Result<(), String> {
        let (target, tile) = (self.target, self.tile);
        let side = tile.side;
        let sides = target.factors.sides();
        let depth = kernel.depth();
        let k = kernel.begin_loop("0", &(tile.rows_per_store() * LANES_PER_AXIS * side / LANES).to_string());
        let element = kernel.int(format!("lane + {k} * {LANES}"));
        let (row, column) =
            (kernel.int(format!("{element} / {side}")), kernel.int(format!("{element} % {side}")));
        let in_tile = match turn {
            // All rows of the tile, in order.
            None => row.clone(),
            Some(turn) => {
                let own_index =
                    kernel.int(format!("{turn} * {} + {row} / {LANES_PER_AXIS}", tile.rows_per_store()));
                let start = format!(
                    "{own_index} / {0} * {LANES_PER_AXIS} + {own_index} % {0} * {1}",
                    tile.vector_width(),
                    tile.vectors_per_axis()
                );
                format!("{start} + {row} % {LANES_PER_AXIS}")
            }
        };
        let i = kernel.int(format!("{} + {in_tile}", group.first[LEFT]));
        let j = kernel.int(format!("{} + {column}", group.first[RIGHT]));
        let inside: Vec<String> = [(&i, sides[LEFT]), (&j, sides[RIGHT])]
            .into_iter()
            .filter(|(_, size)| !size.is_multiple_of(side))
            .map(|(at, size)| format!("{at} < {size}"))
            .collect();
        kernel.begin_if_live((!inside.is_empty()).then(|| inside.join(" && ")));
        let at = target.factors.point(kernel, &group.batch, [&i, &j]);
        let stride = tile.vectors_per_axis();
        let offset = format!("{row} * {stride} + {column} % {stride}");
        let value = kernel.dialect.component(&group.shared, &offset, &format!("{column} / {stride}"));
        let value = kernel.define(Value::new(value, Repr::F32));
        match is_unsplit {
            true => target.finish(kernel, at, value)?,
            false => target.store_part(kernel, &at, &group.part, (number, &value)),
        }
        kernel.close_to(depth);
        Ok(())
    }
}
