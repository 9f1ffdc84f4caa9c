//! Optimizer of a session.

use std::sync::Arc;

use ortrain_program::Memory;

use super::graphs::OptimizerModels;
use crate::distributed::{DataParallel, owned_planes, zero_ranges};
use crate::train::optimizer::DividedOptimizer;
use crate::{CheckpointState, Error, ModelSource, Module, Optimizer, Result};

/// Optimizer of a session.
#[derive(Debug)]
pub(super) enum SessionOptimizer {
    /// The optimizer updates all weights.
    Full(Box<Optimizer>),
    /// The optimizer updates the part of the weights that belongs to this rank. The numbers of elements of each rank
    /// follow, by plane.
    Divided(Box<DividedOptimizer>, Vec<Vec<usize>>),
}

/// Memory of the updates by Adasum, of the size of the trainable planes.
#[derive(Debug)]
pub(super) struct AdasumCopies {
    /// Weights before an update.
    pub(super) before: Vec<Memory>,
    /// Changes of another rank.
    pub(super) received: Vec<Arc<Memory>>,
}

impl AdasumCopies {
    pub(super) fn new(planes: &[Arc<Memory>]) -> Result<AdasumCopies> {
        let copy = |plane: &Arc<Memory>| {
            Memory::try_new(plane.len()).map_err(|source| Error::StateAllocation(source.into()))
        };
        let before = planes.iter().map(copy).collect::<Result<_>>()?;
        let received = planes.iter().map(|plane| Ok(Arc::new(copy(plane)?))).collect::<Result<_>>()?;
        Ok(AdasumCopies { before, received })
    }
}

impl SessionOptimizer {
    pub(super) fn new(
        models: &OptimizerModels,
        state: &mut CheckpointState,
        module: &Module,
        ranks: Option<&DataParallel>,
    ) -> Result<SessionOptimizer> {
        match models {
            OptimizerModels::Full(model) => {
                let optimizer = Optimizer::new(ModelSource::from_proto(model)?, state, module)?;
                Ok(SessionOptimizer::Full(Box::new(optimizer)))
            }
            OptimizerModels::Divided(models) => {
                let (rank, size) = ranks.map_or((0, 1), |ranks| (ranks.rank(), ranks.size()));
                let layout = module.layout();
                let ranges = zero_ranges(layout, size);
                state.set_owned(Some(owned_planes(layout, &ranges[rank])));
                let counts = |plane: usize| ranges.iter().map(|of_rank| of_rank[plane].len()).collect();
                let counts = (0..layout.trainable.len()).map(counts).collect();
                let optimizer = DividedOptimizer::new(models, state, module)?;
                Ok(SessionOptimizer::Divided(Box::new(optimizer), counts))
            }
        }
    }

    /// Returns the optimizer that updates the weights of this rank.
    pub(super) fn optimizer(&self) -> &Optimizer {
        match self {
            SessionOptimizer::Full(optimizer) => optimizer,
            SessionOptimizer::Divided(optimizer, _) => optimizer.update(),
        }
    }

    pub(super) fn optimizer_mut(&mut self) -> &mut Optimizer {
        match self {
            SessionOptimizer::Full(optimizer) => optimizer,
            SessionOptimizer::Divided(optimizer, _) => optimizer.update_mut(),
        }
    }
}
