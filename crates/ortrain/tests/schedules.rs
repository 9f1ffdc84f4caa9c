//! Schedules in checkpoints: damaged ones, and steps that fail.
#![allow(clippy::unwrap_used)]

use ortrain::{CheckpointState, LrScheduler, Schedule};

mod setup {
    #![allow(dead_code, unreachable_pub)]
    include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs"));
}

/// The error of going on from a checkpoint whose scheduler is changed.
fn refused(change: impl FnOnce(&mut ortrain_checkpoint::Scheduler)) -> String {
    let (mut state, _, _) = setup::training().unwrap();
    LrScheduler::new(&mut state, "Warmup(steps=2, then=Linear(total=9))".parse().unwrap(), 0.5).unwrap();
    let mut checkpoint = state.to_checkpoint(true);
    change(checkpoint.extras.scheduler.as_mut().unwrap());
    let state = CheckpointState::from_checkpoint(checkpoint).unwrap();
    LrScheduler::resume(&state).unwrap_err().to_string()
}

#[test]
fn damaged_schedules_are_refused_by_a_sentence() {
    let start = "the schedule in the state is damaged; make a new scheduler: ";
    let table = [
        ("cosine", "a schedule is written like \"Linear(total=100)\", but '(' is expected in front of \"\""),
        ("Cosinus(total=9)", "there is no schedule \"Cosinus\"; did you mean \"Cosine\"?"),
        ("Linear(total=-9)", "total of Linear is -9, but it should be 1 or more"),
        ("ReduceOnPlateau() Memory(bad=-3)", "what it remembers has bad=-3"),
        ("ReduceOnPlateau() Memory(decided=nan)", "what it remembers has decided=NaN"),
    ];
    for (kind, sentence) in table {
        assert_eq!(refused(|record| record.kind = kind.into()), format!("{start}{sentence}"));
    }
    let rate = refused(|record| record.initial_learning_rate = f32::NAN);
    assert_eq!(
        rate,
        format!(
            "{start}the initial learning rate is NaN, but a rate is a finite number that is not negative"
        )
    );
}

#[test]
fn a_damaged_schedule_is_no_text() {
    let (mut state, _, _) = setup::training().unwrap();
    LrScheduler::new(&mut state, Schedule::Constant {}, 0.5).unwrap();
    let mut checkpoint = state.to_checkpoint(true);
    checkpoint.extras.scheduler.as_mut().unwrap().kind = "\u{1b}[31m".into();
    let state = CheckpointState::from_checkpoint(checkpoint).unwrap();
    assert_eq!(state.scheduler_text().as_deref(), Some("damaged"));
}

#[test]
fn a_step_that_fails_leaves_everything() {
    let (mut state, _, optimizer) = setup::training().unwrap();
    let mut scheduler = LrScheduler::new(&mut state, Schedule::Function {}, 0.5).unwrap();
    scheduler.step_with(&mut state, 0.5).unwrap();
    let before = scheduler.clone();
    for value in [f64::NAN, f64::INFINITY, -1.0, 1e300] {
        assert!(scheduler.step_with(&mut state, value).is_err(), "{value}");
    }
    assert!(scheduler.step(&mut state).is_err());
    assert_eq!((optimizer.learning_rate(&state).unwrap(), &scheduler), (0.25, &before));
    assert_eq!(LrScheduler::resume(&state).unwrap(), before);
}

#[test]
fn a_state_without_an_optimizer_has_no_scheduler() {
    let mut state = setup::state().unwrap();
    let sentence = "there is no optimizer on the state yet; make one before its scheduler";
    assert_eq!(LrScheduler::resume(&state).unwrap_err().to_string(), sentence);
    let made = LrScheduler::new(&mut state, Schedule::Constant {}, 0.1);
    assert_eq!(made.unwrap_err().to_string(), sentence);
}
