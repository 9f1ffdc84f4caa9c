//! Optimizer with a state that is divided among ranks.

use ortrain_graph::Graph;
use ortrain_onnx::ModelProto;
use ortrain_ops::optimizers::{DividedModels, bind_with_slots};
use ortrain_ops::passes::infer::infer;
use ortrain_ops::passes::versions::upgrade;

use super::{
    GradientInfo, Optimizer, RankSums, StepOutcome, StepProgram, Table, count_step, optimizer_state,
    planes_of_step, roles_of_planes,
};
use crate::exec::executable_cache::ExecutableCache;
use crate::state::layout::OwnedPlane;
use crate::train::optimizer_model::columns_of;
use crate::{CheckpointState, Error, ModelSource, Module, Result};

/// Function that replaces numbers by their sums over all ranks.
pub(crate) type SumOverRanks<'a> = dyn Fn(&mut [f64]) -> Result<()> + 'a;

/// Optimizer that updates the elements of one rank, and has slots for these elements alone: see
/// [`CheckpointState::set_owned`].
#[derive(Debug)]
pub(crate) struct DividedOptimizer {
    update: Optimizer,
    /// Program of the sums over parameters, if the update needs sums.
    sums: Option<StepProgram>,
    /// Row of each owned tensor among all trained tensors.
    rows: Vec<usize>,
    /// Number of trained tensors.
    tensors: usize,
}

impl DividedOptimizer {
    /// Creates the optimizer on a state with owned parts.
    pub(crate) fn new(
        models: &DividedModels,
        state: &mut CheckpointState,
        module: &Module,
    ) -> Result<DividedOptimizer> {
        let update = Optimizer::new(ModelSource::from_proto(&models.update)?, state, module)?;
        let owned = state.owned().ok_or(Error::OtherState { what: "optimizer" })?.clone();
        let sums = models.sums.as_ref();
        let sums = sums.map(|model| sums_program(model, &owned, &update, state, module)).transpose()?;
        let names = || module.layout().trainable.iter().flat_map(|plane| &plane.tensors);
        let row = |name| names().position(|tensor| tensor.name == name).unwrap_or(0);
        let rows =
            owned.iter().flat_map(|plane| &plane.layout.tensors).map(|tensor| row(tensor.name.clone()));
        let (rows, tensors) = (rows.collect(), names().count());
        Ok(DividedOptimizer { update, sums, rows, tensors })
    }

    /// Returns the optimizer that updates the elements of this rank.
    pub(crate) fn update(&self) -> &Optimizer {
        &self.update
    }

    /// Returns the optimizer that updates the elements of this rank.
    pub(crate) fn update_mut(&mut self) -> &mut Optimizer {
        &mut self.update
    }

    /// Updates the elements of this rank with gradients that are sums over all ranks.
    pub(crate) fn step(
        &mut self,
        state: &mut CheckpointState,
        module: &Module,
        gradients: GradientInfo,
        sum: &SumOverRanks<'_>,
    ) -> Result<StepOutcome> {
        module.check_state(state)?;
        module.check_gradients()?;
        let optimizer = optimizer_state(state)?;
        let step = optimizer.step.saturating_add(1);
        let spec = optimizer.spec.as_ref().ok_or(Error::OtherState { what: "optimizer" })?;
        let (needs_norm, is_scaled) = (spec.needs_norm(), spec.loss_scale);
        let mut rank_sums = RankSums::default();
        if needs_norm {
            let divisor = gradients.accumulated_steps as f64 * f64::from(gradients.loss_scale);
            rank_sums.gradient_norm = module.gradient_norm(state)? / divisor;
        }
        let updated = !is_scaled || rank_sums.gradient_norm.is_finite();
        if updated {
            let Optimizer { program, work, slots, .. } = &mut self.update;
            let planes = planes_of_step(slots, (state, optimizer), module);
            let of_step = (optimizer, Some(optimizer), step);
            if let Some(sums) = &mut self.sums {
                let count = sums.runners.graph().outputs.len();
                let mut totals = vec![0.0; self.tensors * count];
                if !self.rows.is_empty() {
                    let rows = &self.rows;
                    sums.run(work, &planes, of_step, gradients, &rank_sums, &mut |k, value| {
                        let values = value.to_tensor()?.to_f64();
                        rows.iter().zip(values).for_each(|(row, value)| totals[row * count + k] = value);
                        Ok(())
                    })?;
                }
                sum(&mut totals)?;
                rank_sums.rows =
                    self.rows.iter().map(|row| totals[row * count..][..count].to_vec()).collect();
            }
            if !self.rows.is_empty() {
                program.run(work, &planes, of_step, gradients, &rank_sums, &mut |_, _| Ok(()))?;
            }
        }
        module.mark_gradients_used();
        if updated {
            count_step(state, step);
        }
        Ok(StepOutcome { norm: needs_norm.then_some(rank_sums.gradient_norm), updated })
    }
}

/// Builds the program of the sums over parameters.
fn sums_program(
    model: &ModelProto,
    owned: &[OwnedPlane],
    update: &Optimizer,
    state: &CheckpointState,
    module: &Module,
) -> Result<StepProgram> {
    const LABEL: &str = "the model of the optimizer's sums";
    let source = ModelSource::from_proto(model)?;
    let mut graph = Graph::from_model(&source.load()?).map_err(|source| Error::graph(LABEL, source))?;
    let slots: Vec<&str> = update.slots.iter().map(|slot| slot.slot.name.as_str()).collect();
    let in_words = |source| Error::model(LABEL, source);
    let bound = bind_with_slots(&mut graph, &slots).map_err(in_words)?.unwrap_or_default();
    upgrade(&mut graph).map_err(in_words)?;
    infer(&mut graph).map_err(in_words)?;
    let columns = columns_of(LABEL, &update.spec, &bound)?;
    let optimizer = optimizer_state(state)?;
    let (roles, numbers) =
        roles_of_planes(&graph, module.layout(), Some(owned), optimizer, &update.slots, false)?;
    let runners = ExecutableCache::new(graph, roles, module.backend().clone());
    Ok(StepProgram { runners, numbers, table: Table { columns, ..Table::default() } })
}
