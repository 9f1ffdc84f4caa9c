//! Optimizer of a state: its slots and counters.

use std::collections::BTreeMap;
use std::sync::Arc;

use ortrain_checkpoint::ModuleState;
use ortrain_graph::Tensor;

use super::{CheckpointState, OptimizerNeeds, OptimizerState, groups_of};
use crate::state::layout::StateLayout;
use crate::state::slots::{Slot, SlotStorage, Slots, other_optimizer_error};
use crate::{Error, Result};

impl CheckpointState {
    /// Creates the slots that an optimizer model requires for every trainable parameter, from the file or
    /// with initial values. With `replace`, matching slots of another optimizer are reused.
    ///
    /// # Errors
    /// If the state has another optimizer, or a slot of the file is missing or has another shape.
    pub(crate) fn prepare_optimizer(&mut self, needs: &OptimizerNeeds<'_>, replace: bool) -> Result<()> {
        let mut layout = self.layout.clone().ok_or(Error::NominalState)?;
        if let Some(owned) = &self.owned {
            let trainable = owned.iter().map(|plane| plane.layout.clone()).collect();
            layout = Arc::new(StateLayout { trainable, frozen: Vec::new() });
        }
        let unstarted = self.nominal;
        let Some(existing) = &self.optimizer else {
            let ground = SlotStorage {
                layout: &layout,
                entries: &self.entries,
                trained: &self.trainable,
                spec: needs.spec,
                home: &self.home,
            };
            let slots = needs.slots.iter().map(|slot| ground.create(slot)).collect::<Result<Vec<Slot>>>()?;
            let learning_rate = needs.spec.learning_rate as f32;
            self.optimizer = Some(OptimizerState {
                step: 0,
                initial_learning_rate: learning_rate,
                learning_rate,
                has_rate: true,
                schedule_factor: 1.0,
                spec: (!needs.in_model).then(|| needs.spec.clone()),
                slots: Slots::Planes(slots),
                has_uninitialized_slots: unstarted,
                groups: groups_of(needs.spec, &layout),
            });
            return Ok(());
        };
        // A step counter without slots fits any optimizer.
        let bare = existing.spec.is_none() && existing.slots.names().is_empty();
        let same = if bare { Ok(()) } else { self.check_optimizer(existing, needs) };
        let is_other = same.is_err();
        if let (Err(error), false) = (&same, replace) {
            return Err(Error::State(error.to_string()));
        }
        // Settings that were changed during the training take precedence over the settings of the model.
        let mut spec = match &existing.spec {
            Some(spec) if same.is_ok() => spec.clone(),
            _ => needs.spec.clone(),
        };
        let ground = SlotStorage {
            layout: &layout,
            entries: &self.entries,
            trained: &self.trainable,
            spec: &spec,
            home: &self.home,
        };
        let mut anew = 0;
        let mut slots = Vec::with_capacity(needs.slots.len());
        for required in needs.slots {
            let reusable = match &existing.slots {
                // Matching slots of another optimizer are shared; missing ones start anew.
                Slots::Planes(slots) => {
                    let fits = |slot: &&Slot| *slot.name == required.slot.name && ground.fits(slot, required);
                    Ok(slots.iter().find(fits).cloned())
                }
                Slots::Stored(_) if bare => Ok(None),
                Slots::Stored(stored) => ground.restore(required, stored).map(Some),
            };
            slots.push(match reusable {
                Ok(Some(slot)) => slot,
                Err(error) if !replace => return Err(error),
                Ok(None) | Err(_) => {
                    anew += 1;
                    ground.create(required)?
                }
            });
        }
        if (same.is_err() || bare) && anew > 0 {
            // Bias correction of averages that start anew begins with the first step.
            spec.skipped_steps = existing.step;
            spec.groups.iter_mut().for_each(|group| group.skipped_steps = existing.step);
        }
        if let (true, Slots::Planes(existing_slots)) = (needs.in_model, &existing.slots) {
            let slot_names: Vec<Arc<str>> = slots.iter().map(|slot| slot.name.clone()).collect();
            slots.extend(existing_slots.iter().filter(|slot| !slot_names.contains(&slot.name)).cloned());
        }
        if let Some(optimizer) = &mut self.optimizer {
            optimizer.slots = Slots::Planes(slots);
            if !std::mem::replace(&mut optimizer.has_rate, true) || is_other {
                optimizer.learning_rate = needs.spec.learning_rate as f32;
            }
            if is_other {
                (optimizer.initial_learning_rate, optimizer.schedule_factor) = (optimizer.learning_rate, 1.0);
            }
            optimizer.spec = (!needs.in_model).then_some(spec);
            optimizer.groups = optimizer.spec.as_ref().map_or_else(Vec::new, |spec| groups_of(spec, &layout));
            optimizer.has_uninitialized_slots |= unstarted;
        }
        Ok(())
    }

    /// Checks that the optimizer of the state matches an optimizer model.
    pub(super) fn check_optimizer(
        &self,
        existing: &OptimizerState,
        needs: &OptimizerNeeds<'_>,
    ) -> Result<()> {
        let (name, mut slots) = existing.identity();
        let mut required_names: Vec<&str> = needs.slots.iter().map(|slot| slot.slot.name.as_str()).collect();
        // Files store them sorted.
        slots.sort_unstable();
        required_names.sort_unstable();
        let same = match &existing.spec {
            // AdamW of ONNX Runtime reports a missing moment itself; its SGD would drop one.
            None if needs.in_model => slots.iter().all(|slot| required_names.contains(slot)),
            None => name == needs.spec.optimizer && slots == required_names,
            Some(spec) => {
                spec.optimizer == needs.spec.optimizer
                    && slots == required_names
                    && spec.flags == needs.spec.flags
                    && spec.settings.keys().eq(needs.spec.settings.keys())
                    && spec.max_norm.is_some() == needs.spec.max_norm.is_some()
                    || needs.in_model && spec.optimizer == needs.spec.optimizer && slots == required_names
            }
        };
        if same {
            Ok(())
        } else {
            Err(other_optimizer_error((name, &slots), (&needs.spec.optimizer, needs.slots)))
        }
    }

    /// Restores the optimizer state from before [`CheckpointState::prepare_optimizer`].
    pub(crate) fn restore_optimizer(&mut self, before: Option<OptimizerState>) {
        self.optimizer = before;
    }

    /// Initializes slots from parameter values, after a nominal state has loaded them.
    pub(crate) fn initialize_slots(&mut self) -> Result<()> {
        let Some(optimizer) = self.optimizer.as_mut().filter(|optimizer| optimizer.has_uninitialized_slots)
        else {
            return Ok(());
        };
        optimizer.has_uninitialized_slots = false;
        if let (Some(spec), Slots::Planes(slots)) = (&optimizer.spec, &optimizer.slots) {
            for slot in slots {
                let start = spec.slots.iter().find(|known| *known.name == *slot.name);
                let start = start.map_or("zero", |known| &known.start);
                slot.initialize(start, &self.entries, &self.trainable, spec)?;
            }
        }
        Ok(())
    }

    /// Copies the optimizer slots of a parameter, by name. The result is empty for frozen parameters, and
    /// before an optimizer exists.
    ///
    /// # Errors
    /// If no parameter has this name.
    pub fn slots(&self, name: &str) -> Result<BTreeMap<String, Tensor>> {
        let entry = self.find_entry(name)?;
        let Some(optimizer) = &self.optimizer else { return Ok(BTreeMap::new()) };
        Ok(optimizer.slots.of(entry)?.into_iter().map(|slot| (slot.name, slot.tensor)).collect())
    }

    /// Returns the averaged weights of a parameter: the moving average of an optimizer with `ema_decay`, or
    /// the average of a schedule-free optimizer.
    ///
    /// The result is a copy with the type and shape of the parameter. For a frozen parameter, it is the
    /// value.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, module, _) = setup::training()?;
    /// use ortrain::optim::{OptimizerSpec, optimizer_model};
    /// use ortrain::{DType, ModelSource, Optimizer};
    ///
    /// let mut spec = OptimizerSpec::new("SGD")?;
    /// spec.settings.insert("ema_decay".into(), 0.999);
    /// let model = ModelSource::from_proto(&optimizer_model(&spec, &[DType::F32])?)?;
    /// let optimizer = Optimizer::replacing(model, &mut state, &module)?;
    /// assert_eq!(state.average("fc2.bias")?, state.parameter("fc2.bias")?.to_tensor()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If no parameter has this name, the state is nominal, or the optimizer keeps no average.
    pub fn average(&self, name: &str) -> Result<Tensor> {
        let entry = self.find_entry(name)?;
        self.require_values()?;
        let value = self.view(entry).to_tensor()?;
        if !entry.requires_grad {
            return Ok(value);
        }
        let none = || {
            Error::State(
                "the optimizer has no average of the weights; set ema_decay when the artifacts are made, or use \
                 ScheduleFreeAdamW"
                    .into(),
            )
        };
        let optimizer = self.optimizer.as_ref().ok_or_else(none)?;
        let spec = optimizer.spec.as_ref().ok_or_else(none)?;
        let slots = self.slots(name)?;
        let slot = |name: &str| slots.get(name).map(Tensor::to_f64);
        let average =
            spec.averaged_parameter(spec.group_of(name), &value.to_f64(), &slot).ok_or_else(none)?;
        Ok(Tensor::from_f64(value.dtype(), value.dims().to_vec(), &average))
    }

    /// Returns a state with the averages ([`CheckpointState::average`]) instead of the trained weights, and
    /// without optimizer. Use it for evaluation, export, or a checkpoint.
    ///
    /// # Errors
    /// If the state is nominal, or the optimizer keeps no average.
    pub fn averaged(&self) -> Result<CheckpointState> {
        let mut checkpoint = self.to_checkpoint(false)?;
        if let ModuleState::Full { trainable, .. } = &mut checkpoint.module {
            for parameter in trainable {
                parameter.tensor = self.average(&parameter.name)?;
            }
        }
        CheckpointState::from_checkpoint(checkpoint)
    }

    pub(crate) fn optimizer(&self) -> Option<&OptimizerState> {
        self.optimizer.as_ref()
    }

    pub(crate) fn optimizer_mut(&mut self) -> Option<&mut OptimizerState> {
        self.optimizer.as_mut()
    }

    /// Returns the bytes of the optimizer's slots in planes.
    pub(crate) fn slot_bytes(&self) -> usize {
        let slots = match self.optimizer.as_ref().map(|optimizer| &optimizer.slots) {
            Some(Slots::Planes(slots)) => slots.as_slice(),
            _ => &[],
        };
        slots.iter().flat_map(|slot| &slot.planes).map(|plane| plane.len()).sum()
    }
}
