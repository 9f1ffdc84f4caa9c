//! `SparseAttention` of `com.microsoft`, version 1: attention of decoders in which blocks of queries see some blocks of
//! keys (Child et al. 2019, arXiv:1904.10509; Phi-3-small, arXiv:2404.14219).
//!
//! Each layout of blocks is a matrix in compressed sparse rows, and the heads use the layouts in turn. The operator is
//! `GroupQueryAttention` with a bias of negative infinity for hidden blocks.
//!
//! Limits: the layouts are constants, and the caches have a known length.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

use super::common::MICROSOFT;
use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op, ValueRequirement};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::cast;
use crate::support::quantization_grid::{emit, number, typed_input};
use crate::support::sizes::{Size, as_vector, axis_positions, permute_axes, reshape_to, size_of};

const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const PAST_KEY: usize = 3;
const PAST_VALUE: usize = 4;
const BLOCK_ROWS: usize = 5;
const BLOCK_COLUMNS: usize = 6;
const TOTAL_LENGTH: usize = 7;
const KEY_LENGTHS: usize = 8;
const COSINES: usize = 9;
const SINES: usize = 10;

struct SparseAttention {
    heads: i64,
    of_keys: i64,
    block: i64,
}

/// Layouts of visible blocks, `[layouts, blocks, blocks]`.
struct Blocks {
    layouts: usize,
    blocks: usize,
    visible: Vec<u8>,
}

impl Blocks {
    /// Expands layouts in compressed sparse rows.
    fn new(rows: &Tensor, columns: &Tensor) -> Result<Blocks, OpError> {
        let shapes = format!(
            "block_row_indices of shape {:?} and block_col_indices of shape {:?}",
            rows.dims(),
            columns.dims()
        );
        let invalid = |reason: &str| OpError::invalid(format!("{shapes}: {reason}"));
        let (&[layouts, ends], &[of_columns, entries]) = (rows.dims(), columns.dims()) else {
            return Err(invalid("matrices are needed, with a row for each layout"));
        };
        if layouts != of_columns || layouts == 0 || ends < 2 {
            return Err(invalid("both need a row for each layout, and at least one block"));
        }
        let blocks = ends - 1;
        let (Some(rows), Some(columns)) = (rows.to_i64(), columns.to_i64()) else {
            return Err(invalid("integers are needed"));
        };
        let mut visible = vec![0; layouts * blocks * blocks];
        for layout in 0..layouts {
            for row in 0..blocks {
                let at = layout * ends + row;
                let range = (usize::try_from(rows[at]), usize::try_from(rows[at + 1]));
                let (Ok(from), Ok(to)) = range else { return Err(invalid("an end of a row is negative")) };
                if from > to || to > entries {
                    return Err(invalid("the ends of the rows do not ascend up to the number of entries"));
                }
                for &column in &columns[layout * entries + from..layout * entries + to] {
                    let column = usize::try_from(column).ok().filter(|&column| column < blocks);
                    let column = column.ok_or_else(|| invalid("an entry is no index of a block"))?;
                    visible[(layout * blocks + row) * blocks + column] = 1;
                }
            }
        }
        Ok(Blocks { layouts, blocks, visible })
    }
}

impl SparseAttention {
    fn read(node: &Node) -> Result<SparseAttention, OpError> {
        let positive = |name: &'static str| {
            let count = Attrs::required(name, node.attrs.int(name)?)?;
            if count < 1 {
                return Err(OpError::invalid(format!("{name} must be positive, got {count}")));
            }
            Ok(count)
        };
        Ok(SparseAttention {
            heads: positive("num_heads")?,
            of_keys: positive("kv_num_heads")?,
            block: positive("sparse_block_size")?,
        })
    }

    /// Checks that the layouts fit the heads and a cache of this length.
    fn check_blocks(&self, blocks: &Blocks, cache: Option<usize>) -> Result<(), OpError> {
        if !(self.heads as usize).is_multiple_of(blocks.layouts) {
            return Err(OpError::invalid(format!(
                "num_heads, {}, must be a multiple of the {} layouts",
                self.heads, blocks.layouts
            )));
        }
        if let Some(length) =
            cache.filter(|&length| length > blocks.blocks.saturating_mul(self.block as usize))
        {
            return Err(OpError::invalid(format!(
                "the cache has {length} positions, but {} blocks of {} have fewer",
                blocks.blocks, self.block
            )));
        }
        Ok(())
    }
}

impl Op for SparseAttention {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let required = [QUERY, PAST_KEY, PAST_VALUE, BLOCK_ROWS, BLOCK_COLUMNS, TOTAL_LENGTH, KEY_LENGTHS];
        if let Some(k) = required.into_iter().find(|&k| !cx.has_input(k)) {
            return Err(OpError::invalid(format!("input {k} is missing")));
        }
        if cx.node().inputs.len() > SINES + 1 || cx.node().outputs.len() > 3 {
            return Err(OpError::invalid("it has too many inputs or outputs"));
        }
        let dtype = cx.expect_dtype(QUERY, "a float type", DType::is_float)?;
        cx.expect_same_dtype([QUERY, KEY, VALUE, PAST_KEY, PAST_VALUE, COSINES, SINES])?;
        for k in [BLOCK_ROWS, BLOCK_COLUMNS, TOTAL_LENGTH, KEY_LENGTHS] {
            cx.expect_dtype(k, "int32", |dtype| dtype == DType::I32)?;
        }
        if self.heads % self.of_keys != 0 {
            return Err(OpError::invalid(format!(
                "num_heads, {}, must be a multiple of kv_num_heads, {}",
                self.heads, self.of_keys
            )));
        }
        let past = cx.shape(PAST_KEY).cloned();
        if let (Some(rows), Some(columns)) = (cx.constant(BLOCK_ROWS), cx.constant(BLOCK_COLUMNS)) {
            let blocks = Blocks::new(rows, columns)?;
            self.check_blocks(&blocks, past.as_ref().and_then(|past| past.get(2)).and_then(Dim::known))?;
        }
        let query = cx.shape(QUERY).cloned();
        if let Some(query) = query.as_ref().filter(|query| query.rank() != 3) {
            return Err(OpError::invalid(format!(
                "the queries have shape {query}; [batch, length, width] is needed"
            )));
        }
        let packed = self.heads.saturating_add(self.of_keys.saturating_mul(2));
        let parts = if cx.has_input(KEY) { self.heads } else { packed } as usize;
        if let Some(query) = &query
            && query[2].known().is_some_and(|width| width % parts != 0 || width < parts)
        {
            return Err(OpError::invalid(format!(
                "the last axis of the queries, of shape {query}, cannot be divided into {parts} heads"
            )));
        }
        let result = query.map(|query| -> Shape {
            let width =
                query[2].known().map(|width| Dim::Known((width / parts).saturating_mul(self.heads as usize)));
            [query[0].clone(), query[1].clone(), width.unwrap_or_else(|| cx.unknown_dim(0, 2))]
                .into_iter()
                .collect()
        });
        cx.set_output(0, dtype, result);
        cx.set_output(1, dtype, past.clone());
        cx.set_output(2, dtype, past);
        Ok(())
    }

    fn needs_value(&self, k: usize, dtype: DType) -> ValueRequirement {
        match k {
            // The length of the presents is the length of the cache, or the total length.
            TOTAL_LENGTH => ValueRequirement::Always,
            _ if dtype.is_float() => ValueRequirement::Never,
            _ => ValueRequirement::ForShapes,
        }
    }
}

/// Adds the bias of the scores: negative infinity for hidden blocks, `[batch, heads, queries, keys]`.
fn block_bias(
    rw: &mut Rewrite<'_>,
    op: &SparseAttention,
    blocks: &Blocks,
    (lengths, total): (ValueId, ValueId),
    dtype: DType,
) -> Result<ValueId, OpError> {
    let (query, past) = (rw.required_input(QUERY)?, rw.required_input(PAST_KEY)?);
    let count = size_of(rw, query, 1);
    // The position of the first query of each item: 0 for a prompt.
    let along = axis_positions(rw, count);
    let count = as_vector(rw, count);
    let before = emit(rw, "Sub", &[lengths, count]);
    let is_prompt = emit(rw, "Equal", &[count, total]);
    let zero = rw.ints("zero", &[0]);
    let before = emit(rw, "Where", &[is_prompt, zero, before]);
    let before = reshape_to(rw, before, &[Size::Number(-1), Size::Number(1)]);
    let positions = emit(rw, "Add", &[before, along]);
    let block = number(rw, DType::I64, op.block as f64);
    let of_queries = emit(rw, "Div", &[positions, block]);
    let keys = size_of(rw, past, 2);
    let keys = axis_positions(rw, keys);
    let of_keys = emit(rw, "Div", &[keys, block]);
    let dims = [blocks.layouts, blocks.blocks, blocks.blocks];
    let visible = rw.constant("visible", Tensor::from_slice(DType::Bool, &dims, &blocks.visible));
    let gather = |rw: &mut Rewrite<'_>, table: ValueId, at: ValueId, axis: i64| {
        rw.add("Gather", &[table, at], Attrs::new().with("axis", axis))
    };
    let rows = gather(rw, visible, of_queries, 1);
    let seen = gather(rw, rows, of_keys, 3);
    let seen = permute_axes(rw, seen, &[1, 0, 2, 3]);
    let layout_of_head: Vec<i64> = (0..op.heads).map(|head| head % blocks.layouts as i64).collect();
    let layout_of_head = rw.ints("layout", &layout_of_head);
    let seen = gather(rw, seen, layout_of_head, 1);
    let (zero, hidden) = (number(rw, dtype, 0.0), number(rw, dtype, f64::NEG_INFINITY));
    Ok(emit(rw, "Where", &[seen, zero, hidden]))
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = SparseAttention::read(rw.node())?;
    let (rows, columns) = (rw.required_input(BLOCK_ROWS)?, rw.required_input(BLOCK_COLUMNS)?);
    let (Some(rows), Some(columns)) = (rw.constant_of(rows), rw.constant_of(columns)) else {
        return Err(OpError::unsupported(
            "block_row_indices and block_col_indices must be constants; make them initializers of the model",
        ));
    };
    let blocks = Blocks::new(rows, columns)?;
    let (query, dtype) = typed_input(rw, QUERY)?;
    let width = rw.shape(query).and_then(|shape| shape.get(2).and_then(Dim::known));
    if width.is_none_or(|width| (width as i64) < op.heads) {
        return Err(OpError::unsupported(
            "the width of the queries must be known; declare their shape in the model",
        ));
    }
    let (lengths, total) = (rw.required_input(KEY_LENGTHS)?, rw.required_input(TOTAL_LENGTH)?);
    let wide = [lengths, total].map(|id| {
        let flat = reshape_to(rw, id, &[Size::Number(-1)]);
        cast(rw, flat, DType::I32, DType::I64)
    });
    let bias = block_bias(rw, &op, &blocks, (wide[0], wide[1]), dtype)?;
    let one = number(rw, DType::I32, 1.0);
    let last_keys = emit(rw, "Sub", &[lengths, one]);
    let mut attrs = rw.attrs().clone();
    attrs.0.remove("sparse_block_size");
    let of = |k: usize| rw.input(k);
    let inputs = [
        Some(query),
        of(KEY),
        of(VALUE),
        of(PAST_KEY),
        of(PAST_VALUE),
        Some(last_keys),
        Some(total),
        of(COSINES),
        of(SINES),
        None,
        Some(bias),
    ];
    let results = rw.add_node(MICROSOFT, "GroupQueryAttention", &inputs, 3, attrs);
    for (k, value) in results.into_iter().enumerate() {
        if rw.has_output(k) {
            rw.replace_output(k, value);
        }
    }
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(SparseAttention::read(node)?))
}

pub(super) fn definitions() -> Vec<Definition> {
    vec![Definition::new(MICROSOFT, "SparseAttention", &[1], build).composition(decompose).sample(|_| {
        let floats = |dims: &[usize]| Some(ValueType::tensor(DType::F32, dims));
        let ints = |dims: &[usize]| Some(ValueType::tensor(DType::I32, dims));
        let tokens = [floats(&[2, 2, 4]), floats(&[2, 2, 2]), floats(&[2, 2, 2])];
        let caches = [floats(&[2, 1, 4, 2]), floats(&[2, 1, 4, 2])];
        let lengths = [ints(&[1, 2]), ints(&[1, 1]), ints(&[1]), ints(&[2])];
        let inputs = tokens.into_iter().chain(caches).chain(lengths).collect();
        let attrs = [("num_heads", 2i64), ("kv_num_heads", 1), ("sparse_block_size", 16)];
        let attrs = attrs.into_iter().fold(Attrs::new(), |attrs, (name, value)| attrs.with(name, value));
        Sample { inputs, ..Sample::of(attrs) }
    })]
}
