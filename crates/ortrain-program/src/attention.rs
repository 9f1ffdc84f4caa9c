//! The instruction for attention.

use ortrain_expr::{Access, DType, Dims, Inst};

use crate::{Buffer, BufferId, Loop};

/// Attention, or the gradients of its operands, without a buffer for the scores.
///
/// For each batch index: the products of queries and keys go through `scores`; the softmax over the keys is taken; it
/// goes through `weights`; and what comes of it weighs the values, which are summed up over the keys. Everything is
/// computed in the type of the operands, `F32` or `F64`.
///
/// The space of `scores`, `weights` and their gradients is `batch + [queries, keys]`. In each of these nests the first
/// load is what it is given and the only store is what becomes of it; both are row-major over all of the space and have
/// no buffer (so neither `reads[0]` nor `writes[0]` is used). They gather nothing of what they are given, and cannot
/// fail.
#[derive(Clone, Debug)]
pub struct Attention {
    /// Sizes of the batch axes: heads are one of them.
    pub batch: Dims,
    /// Number of queries.
    pub queries: usize,
    /// Number of keys and values.
    pub keys: usize,
    /// Elements of a query and of a key.
    pub size: usize,
    /// Elements of a value.
    pub width: usize,
    /// The queries, over `batch + [queries, size]`.
    pub q: Operand,
    /// The keys, over `batch + [keys, size]`.
    pub k: Operand,
    /// The values, over `batch + [keys, width]`.
    pub v: Operand,
    /// What becomes of the product of a query and a key: scale, mask.
    pub scores: Loop,
    /// What becomes of the softmax: dropout.
    pub weights: Loop,
    /// What is computed.
    pub pass: AttentionPass,
}

/// A buffer and how an instruction reaches into it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Where it lies.
    pub buffer: BufferId,
    /// Where its elements are.
    pub access: Access,
}

/// What is computed of an [`Attention`].
#[derive(Clone, Debug)]
pub enum AttentionPass {
    /// The sums. The loop is their epilogue, over `batch + [queries, width]`; load 0 is the sums, and has no buffer.
    Output(Box<Loop>),
    /// Gradients, of the one that is given for the sums.
    Gradients(Box<AttentionGradients>),
}

/// The gradients of an [`Attention`]; those that are wanted have an epilogue, whose load 0 is the gradient itself and
/// has no buffer.
#[derive(Clone, Debug)]
pub struct AttentionGradients {
    /// The gradient of the sums, over `batch + [queries, width]`.
    pub given: Operand,
    /// From the gradient of what weighs the values to that of the softmax. Load 1 is the softmax itself, and has no
    /// buffer either.
    pub weights: Loop,
    /// What is left of the softmax where its gradient is taken: with what becomes of it here, and not with the softmax
    /// itself, the gradient of what weighs the values is multiplied. Where rows of nothing but -inf give NaN, and a graph
    /// goes on with zeros in their place, it makes these zeros.
    pub softmax: Loop,
    /// From the gradient of the softmax's operand to that of the product.
    pub scores: Loop,
    /// The gradient of the queries, over their space.
    pub q: Option<Loop>,
    /// That of the keys.
    pub k: Option<Loop>,
    /// That of the values.
    pub v: Option<Loop>,
}

/// A nest of an attention.
pub(crate) struct Part<'a> {
    pub(crate) part: &'a Loop,
    /// Its name in dumps.
    pub(crate) name: &'static str,
    /// How many of its first loads have no buffer.
    pub(crate) given: usize,
    /// Whether its store has one.
    pub(crate) stores: bool,
    /// The last two sizes of its space.
    sizes: [usize; 2],
}

impl Part<'_> {
    /// Loads that have buffers.
    pub(crate) fn reads(&self) -> &[BufferId] {
        &self.part.reads[self.given..]
    }

    /// Stores that have buffers.
    pub(crate) fn writes(&self) -> &[BufferId] {
        if self.stores { &self.part.writes } else { &[] }
    }
}

impl Attention {
    /// The operands, each with the last two sizes of its space.
    pub(crate) fn operands(&self) -> impl Iterator<Item = (&Operand, [usize; 2])> {
        let &Attention { queries, keys, size, width, .. } = self;
        let given = match &self.pass {
            AttentionPass::Output(_) => None,
            AttentionPass::Gradients(gradients) => Some((&gradients.given, [queries, width])),
        };
        [(&self.q, [queries, size]), (&self.k, [keys, size]), (&self.v, [keys, width])]
            .into_iter()
            .chain(given)
    }

    /// The nests, in the order in which kernels take their buffers.
    pub(crate) fn parts(&self) -> Vec<Part<'_>> {
        let &Attention { queries, keys, size, width, .. } = self;
        let scores = |part, name, given| Part { part, name, given, stores: false, sizes: [queries, keys] };
        let mut parts = vec![scores(&self.scores, "scores", 1), scores(&self.weights, "weights", 1)];
        let result = |part, name, lines, elements| Part {
            part,
            name,
            given: 1,
            stores: true,
            sizes: [lines, elements],
        };
        match &self.pass {
            AttentionPass::Output(output) => parts.push(result(output, "output", queries, width)),
            AttentionPass::Gradients(gradients) => {
                parts.push(scores(&gradients.weights, "gradient of weights", 2));
                parts.push(scores(&gradients.softmax, "softmax of the gradient", 1));
                parts.push(scores(&gradients.scores, "gradient of scores", 1));
                let results = [
                    (&gradients.q, "gradient of q", queries, size),
                    (&gradients.k, "gradient of k", keys, size),
                    (&gradients.v, "gradient of v", keys, width),
                ];
                for (part, name, lines, elements) in results {
                    parts.extend(part.as_ref().map(|part| result(part, name, lines, elements)));
                }
            }
        }
        parts
    }

    /// The buffers in the order in which kernels take them: operands, then loads and stores of each nest.
    #[must_use]
    pub fn buffers(&self) -> Vec<BufferId> {
        let mut buffers: Vec<BufferId> = self.operands().map(|(operand, _)| operand.buffer).collect();
        for part in self.parts() {
            buffers.extend(part.reads());
            buffers.extend(part.writes());
        }
        buffers
    }

    pub(crate) fn reads(&self) -> Vec<BufferId> {
        let operands = self.operands().map(|(operand, _)| operand.buffer);
        operands.chain(self.parts().iter().flat_map(|part| part.reads().to_vec())).collect()
    }

    pub(crate) fn writes(&self) -> Vec<BufferId> {
        self.parts().iter().flat_map(|part| part.writes().to_vec()).collect()
    }

    /// Puts other buffers in place of those that it reads and of those that it writes.
    pub(crate) fn rename(
        &mut self,
        read: &impl Fn(BufferId) -> BufferId,
        write: &impl Fn(BufferId) -> BufferId,
    ) {
        let all = |l: &mut Loop| {
            l.reads.iter_mut().for_each(|id| *id = read(*id));
            l.writes.iter_mut().for_each(|id| *id = write(*id));
        };
        for operand in [&mut self.q, &mut self.k, &mut self.v] {
            operand.buffer = read(operand.buffer);
        }
        // What has no buffer may have any name.
        all(&mut self.scores);
        all(&mut self.weights);
        match &mut self.pass {
            AttentionPass::Output(output) => all(output),
            AttentionPass::Gradients(gradients) => {
                gradients.given.buffer = read(gradients.given.buffer);
                all(&mut gradients.weights);
                all(&mut gradients.softmax);
                all(&mut gradients.scores);
                [&mut gradients.q, &mut gradients.k, &mut gradients.v].into_iter().flatten().for_each(all);
            }
        }
    }

    /// What would take it outside its buffers, or contradicts itself, if anything.
    pub(crate) fn fault(&self, buffers: &[Buffer]) -> Option<String> {
        let buffer = |id: BufferId| &buffers[id.0 as usize];
        let dtype = buffer(self.q.buffer).dtype;
        let sizes = [self.queries, self.keys, self.size, self.width];
        if !matches!(dtype, DType::F32 | DType::F64) || self.batch.iter().chain(&sizes).any(|&size| size == 0)
        {
            return Some(format!("an attention of {dtype} over {:?} and {sizes:?}", self.batch));
        }
        let space = |sizes: [usize; 2]| self.batch.iter().copied().chain(sizes).collect::<Dims>();
        for (Operand { buffer: id, access }, sizes) in self.operands() {
            let (dims, buffer) = (space(sizes), buffer(*id));
            let fits = access.dtype == dtype
                && (access.dtype, access.len) == (buffer.dtype, buffer.len)
                && access.strides.len() == dims.len();
            if !fits {
                return Some(format!("an operand's access does not fit {:?}", buffer.label));
            }
            if let Some((low, high)) = access.reach(&dims)
                && (low < 0 || high >= access.len as isize)
            {
                return Some(format!("elements {low}..={high} of an operand of {}", access.len));
            }
        }
        self.parts().iter().find_map(|part| {
            let (Loop { nest, reads, writes }, name) = (part.part, part.name);
            let dims = space(part.sizes);
            if nest.dims != dims || nest.inner != 0 || nest.segments.is_some() || nest.expr.can_fail() {
                return Some(format!("{name} over another space"));
            }
            if (reads.len(), writes.len()) != (nest.loads.len(), nest.stores.len())
                || reads.len() < part.given
            {
                return Some(format!("loads and stores of {name} that are not those of its buffers"));
            }
            let whole = Access::contiguous(dtype, &dims);
            let (given, loads) = nest.loads.split_at(part.given);
            let given_type = given.iter().all(|load| load.dtype == dtype);
            let row_major = given.iter().chain(&nest.stores).all(|access| *access == whole);
            if !given_type || !part.stores && (nest.stores.len() != 1 || !row_major) {
                return Some(format!("{name} of another type or order"));
            }
            let gathers =
                |inst: Inst| matches!(inst, Inst::LoadAt(slot, _) if usize::from(slot) < part.given);
            if nest.expr.insts().iter().any(|&(inst, _)| gathers(inst)) {
                return Some(format!("{name} that gathers what it is given"));
            }
            let stores = if part.stores { nest.stores.as_slice() } else { &[] };
            let pairs = loads.iter().zip(part.reads()).chain(stores.iter().zip(part.writes()));
            for (access, &id) in pairs {
                if (access.dtype, access.len) != (buffer(id).dtype, buffer(id).len) {
                    return Some(format!("an access of {name} that does not fit {:?}", buffer(id).label));
                }
            }
            nest.fault()
        })
    }
}
