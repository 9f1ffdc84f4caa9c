//! Schedules in checkpoints: damaged ones, and steps that fail.
#![allow(clippy::unwrap_used)]

use ortrain::{CheckpointState, LrScheduler, Schedule};

mod setup {
    #![allow(dead_code, unreachable_pub)]
    include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs"));
}

/// Returns the error of resuming from a checkpoint with a changed scheduler.
fn resume_error(change: impl FnOnce(&mut ortrain_checkpoint::Scheduler)) -> String {
    let (mut state, _, _) = setup::training().unwrap();
    LrScheduler::new(&mut state, "Warmup(steps=2, then=Linear(total=9))".parse().unwrap(), 0.5).unwrap();
    let mut checkpoint = state.to_checkpoint(true).unwrap();
    change(checkpoint.extras.scheduler.as_mut().unwrap());
    let state = CheckpointState::from_checkpoint(checkpoint).unwrap();
    LrScheduler::resume(&state).unwrap_err().to_string()
}

#[test]
fn damaged_schedules_report_errors() {
    let start = "the schedule in the state is damaged; make a new scheduler: ";
    let table = [
        ("cosine", "a schedule is written like \"Linear(total=100)\", but '(' is expected before \"\""),
        ("Cosinus(total=9)", "there is no schedule \"Cosinus\"; did you mean \"Cosine\"?"),
        ("Linear(total=-9)", "total of Linear must be 1 or more, got -9"),
        ("ReduceOnPlateau() Memory(bad=-3)", "the memory of the schedule has bad=-3"),
        ("ReduceOnPlateau() Memory(decided=nan)", "the memory of the schedule has decided=NaN"),
    ];
    for (kind, sentence) in table {
        assert_eq!(resume_error(|record| record.kind = kind.into()), format!("{start}{sentence}"));
    }
    let rate = resume_error(|record| record.initial_learning_rate = f32::NAN);
    assert_eq!(rate, format!("{start}the initial learning rate must be finite and at least 0, got NaN"));
}

#[test]
fn rejects_damaged_schedule_text() {
    let (mut state, _, _) = setup::training().unwrap();
    LrScheduler::new(&mut state, Schedule::Constant {}, 0.5).unwrap();
    let mut checkpoint = state.to_checkpoint(true).unwrap();
    checkpoint.extras.scheduler.as_mut().unwrap().kind = "\u{1b}[31m".into();
    let state = CheckpointState::from_checkpoint(checkpoint).unwrap();
    assert_eq!(state.scheduler_text().as_deref(), Some("damaged"));
}

#[test]
fn failed_step_changes_nothing() {
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
fn scheduler_requires_optimizer() {
    let mut state = setup::state().unwrap();
    let sentence = "there is no optimizer on the state yet; make one before its scheduler";
    assert_eq!(LrScheduler::resume(&state).unwrap_err().to_string(), sentence);
    let scheduler = LrScheduler::new(&mut state, Schedule::Constant {}, 0.1);
    assert_eq!(scheduler.unwrap_err().to_string(), sentence);
}

#[test]
fn any_text_parses_or_fails() {
    let value = |setting: &str| match setting {
        "milestones" => "[3, 9]",
        "then" => "Exponential(gamma=0.5)",
        "gamma" => "0.5",
        _ => "9",
    };
    let texts = Schedule::kinds().iter().map(|(name, settings)| {
        let settings =
            settings.iter().map(|(name, default)| format!("{name}={}", default.unwrap_or(value(name))));
        format!("{name}({})", settings.collect::<Vec<_>>().join(", "))
    });
    let texts: Vec<String> = texts.filter(|text| text.parse::<Schedule>().is_ok()).collect();
    assert!(texts.len() > 10, "{texts:?}");
    let signs = b"()[]=,. -+0123456789einfnaTrueFalse\"\\\0\xff".as_slice();
    // A Lehmer generator: the same texts in every run.
    let mut seed = 27_u64;
    let mut draw = |below: usize| {
        seed = seed * 48_271 % 2_147_483_647;
        usize::try_from(seed).unwrap() % below
    };
    let mut read = 0;
    for round in 0..20_000 {
        let mut text = texts[round % texts.len()].clone().into_bytes();
        for _ in 0..1 + draw(4) {
            let (at, sign) = (draw(text.len() + 1), signs[draw(signs.len())]);
            if draw(2) == 0 && at < text.len() { text[at] = sign } else { text.insert(at, sign) }
        }
        let Ok(schedule) = String::from_utf8_lossy(&text).parse::<Schedule>() else { continue };
        read += 1;
        assert_eq!(schedule.to_string().parse::<Schedule>().unwrap(), schedule);
        for step in [i64::MIN, -1, 0, 1, 1000, i64::MAX] {
            assert!(schedule.factor(step) >= 0.0, "{schedule} is {} at {step}", schedule.factor(step));
        }
    }
    assert!(read > 100, "{read} of the texts were schedules");
}
