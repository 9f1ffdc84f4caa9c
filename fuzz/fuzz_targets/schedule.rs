//! Parses any text as a schedule. No text may cause a panic. A parsed schedule can be parsed again from its own text.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ortrain::Schedule;

fuzz_target!(|text: &str| {
    if let Ok(schedule) = text.parse::<Schedule>() {
        assert_eq!(schedule.to_string().parse::<Schedule>().ok().as_ref(), Some(&schedule));
        for step in [i64::MIN, -1, 0, 1, 100, i64::MAX] {
            let factor = schedule.factor(step);
            assert!(factor >= 0.0, "{schedule} is {factor} at {step}");
        }
    }
});
