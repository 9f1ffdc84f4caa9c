//! Update of the weights by the gradients of one rank or several.

use ortrain_graph::Tensor;

use super::{TrainingSession, restore_planes};
use crate::Result;
use crate::distributed::{DataParallel, Strategy, adasum_in_place, combine_planes};
use crate::face::classic::session_optimizer::{AdasumCopies, SessionOptimizer};
use crate::train::optimizer::{GradientInfo, StepOutcome};

impl TrainingSession {
    /// Updates the weights. Returns the norm of the gradients, and true if they are finite.
    pub(super) fn update(&mut self, rate: f32, loss_scale: f32) -> Result<(Option<f64>, bool)> {
        let strategy = self.ranks.as_ref().map(DataParallel::strategy);
        let Some(optimizer) = &mut self.optimizer else { return Ok((None, true)) };
        optimizer.optimizer_mut().set_learning_rate(&mut self.checkpoint, rate)?;
        let stepped = match strategy {
            Some(Strategy::Adasum) => self.step_by_adasum(loss_scale)?,
            _ => self.step_by_sum(loss_scale)?,
        };
        match self.frozen_before_window.take().filter(|_| !stepped.updated) {
            Some(before) => restore_planes(self.checkpoint.frozen_planes(), &before)?,
            None => self.average_statistics_of_ranks()?,
        }
        // The reported norm includes the loss scale.
        Ok((stepped.norm.map(|norm| norm * f64::from(loss_scale)), stepped.updated))
    }

    /// Steps with the mean of the gradients of all ranks.
    fn step_by_sum(&mut self, loss_scale: f32) -> Result<StepOutcome> {
        let mut gradients = GradientInfo { accumulated_steps: self.runs_per_update, loss_scale };
        if let (Some(ranks), Some(sums)) = (&self.ranks, &self.sums) {
            sums.finish(&**ranks.data(), self.module.gradient_planes(), &mut self.communication_time)?;
            gradients.accumulated_steps = self.runs_per_update.saturating_mul(ranks.size() as i64);
        }
        match (&mut self.optimizer, &self.ranks) {
            (Some(SessionOptimizer::Divided(optimizer, counts)), Some(ranks)) => {
                let sum = |values: &mut [f64]| ranks.sum_numbers(values);
                let stepped = optimizer.step(&mut self.checkpoint, &self.module, gradients, &sum)?;
                if stepped.updated {
                    let planes =
                        self.checkpoint.trainable_planes().iter().zip(&self.module.layout().trainable);
                    for ((plane, layout), counts) in planes.zip(counts) {
                        ranks.gather(plane, layout.dtype, counts.clone())?;
                    }
                }
                Ok(stepped)
            }
            (Some(optimizer), _) => {
                let optimizer = optimizer.optimizer_mut();
                optimizer.step_with(&mut self.checkpoint, &self.module, gradients)
            }
            (None, _) => Ok(StepOutcome { norm: None, updated: true }),
        }
    }

    /// Steps with the Adasum of the changes that the ranks compute from their own gradients. The moments of each rank
    /// follow its own gradients.
    fn step_by_adasum(&mut self, loss_scale: f32) -> Result<StepOutcome> {
        let (Some(ranks), Some(optimizer)) = (&self.ranks, &mut self.optimizer) else {
            return Ok(StepOutcome { norm: None, updated: true });
        };
        let gradients = GradientInfo { accumulated_steps: self.runs_per_update, loss_scale };
        let is_gated = self.low_precision.is_some();
        if is_gated {
            let norm = self.module.gradient_norm(&self.checkpoint)?;
            if !ranks.all(norm.is_finite())? {
                let divisor = self.runs_per_update as f64 * f64::from(loss_scale);
                return Ok(StepOutcome { norm: Some(norm / divisor), updated: false });
            }
        }
        let planes = self.checkpoint.trainable_planes().to_vec();
        let layouts = &self.module.layout().clone().trainable;
        let copies = match &mut self.adasum_copies {
            Some(copies) => copies,
            none => none.insert(AdasumCopies::new(&planes)?),
        };
        for ((plane, old), layout) in planes.iter().zip(&copies.before).zip(layouts) {
            combine_planes(layout.dtype, (plane, plane), old, |value, _| value)?;
        }
        let optimizer = optimizer.optimizer_mut();
        let mut stepped = optimizer.step_with(&mut self.checkpoint, &self.module, gradients)?;
        // The step has used the gradients, so their planes can hold the changes.
        let changes = self.module.gradient_planes();
        for (k, layout) in layouts.iter().enumerate() {
            let (old, received, change) = (&copies.before[k], &copies.received[k], &changes[k]);
            combine_planes(layout.dtype, (&planes[k], old), change, |new, old| new - old)?;
            let mut distance = 1;
            while distance < ranks.size() {
                ranks.exchange(change, received, layout.dtype, ranks.rank() ^ distance)?;
                adasum_in_place(layout, change, received)?;
                distance *= 2;
            }
        }
        let is_finite = !is_gated || self.module.gradient_norm(&self.checkpoint)?.is_finite();
        for (k, layout) in layouts.iter().enumerate() {
            combine_planes(layout.dtype, (&copies.before[k], &changes[k]), &planes[k], |old, change| {
                if is_finite { old + change } else { old }
            })?;
        }
        stepped.updated &= is_finite;
        Ok(stepped)
    }

    /// Replaces the running statistics by their means over all ranks.
    fn average_statistics_of_ranks(&mut self) -> Result<()> {
        let Some(ranks) = self.ranks.as_ref().filter(|_| self.module.updates_frozen()) else { return Ok(()) };
        let mut statistics = self.running_statistics()?;
        statistics.retain(|_, value| value.dtype().is_float());
        let means = ranks.mean(statistics.values().flat_map(Tensor::to_f64).collect())?;
        let mut rest = means.as_slice();
        for (name, value) in &statistics {
            let (own, others) = rest.split_at(value.dims().iter().product());
            rest = others;
            let mean = Tensor::from_f64(value.dtype(), value.dims().to_vec(), own);
            self.checkpoint.set_parameter(name, &mean)?;
        }
        Ok(())
    }
}
