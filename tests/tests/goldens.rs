//! `GANTRY_GOLDENS=DIR cargo test -p gantry-tests goldens`: every case of a folder against this project.

use gantry_tests::goldens::case::{Case, list};
use gantry_tests::goldens::{Outcome, check, folder, run};

#[test]
fn goldens() {
    let folder = folder();
    let (table, well) = run(&folder).unwrap_or_else(|e| panic!("{e}"));
    println!("{}\n{table}", folder.display());
    assert!(well, "{table}");
}

fn first_of(kind: &str) -> Case {
    let own = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens");
    let mut cases = list(&own).unwrap().into_iter().map(|name| Case::read(&own, &name).unwrap());
    cases.find(|case| case.kind == kind).unwrap_or_else(|| panic!("no case of kind {kind}"))
}

/// The check must notice a change of any single result by more than the tolerance.
#[test]
fn goldens_notice_a_wrong_number() {
    for kind in ["rmsnorm", "causal_conv1d", "ssd_scan", "attention", "moe", "cross_entropy", "adam", "hybrid_tiny_hf"]
    {
        let case = first_of(kind);
        let results: Vec<String> =
            case.tensors.keys().filter(|n| n.starts_with("out.") || n.starts_with("grad.")).cloned().collect();
        for name in results.iter().step_by(results.len().div_ceil(6)) {
            let mut wrong = case.clone();
            let data = &mut wrong.tensors.get_mut(name).unwrap().data;
            let largest = data.iter().fold(0.0f64, |m, x| m.max(x.abs())).max(1.0);
            let at = data.len() / 2;
            data[at] += 1e-3 * largest;
            match check(&wrong) {
                Outcome::Failed(e) => assert!(e.contains(name.as_str()), "{e}"),
                other => panic!("{}: a wrong {name} went unnoticed: {other:?}", case.name),
            }
        }
    }
}

/// So must the check of data sets, whose tensors have other names: in each of them, and none may be left out.
#[test]
fn goldens_notice_a_wrong_number_of_a_data_set() {
    let case = first_of("gpt_dataset");
    for name in case.tensors.keys() {
        let mut wrong = case.clone();
        let data = &mut wrong.tensors.get_mut(name).unwrap().data;
        let at = data.len() / 2;
        data[at] += 1.0;
        assert!(matches!(check(&wrong), Outcome::Failed(_)), "a wrong {name} went unnoticed");
    }
    let mut more = case.clone();
    let tokens = more.tensors["u16.base.tokens"].clone();
    more.tensors.insert("u16.new.tokens".into(), tokens);
    assert!(matches!(check(&more), Outcome::Failed(e) if e == "u16.new.tokens was not compared"));
}

/// And the checks of formulas, whose results stand in the description.
#[test]
fn goldens_notice_a_wrong_number_of_a_description() {
    let places = [
        ("flextron_schedules", "/tau/1/tau/3"),
        ("flextron_schedules", "/linear_scaler/0/values/2"),
        ("flextron_schedules", "/per_list_to_int_list/ints/mamba/2"),
        ("flextron_budget_choice", "/rows/0/sequence/50/budget"),
        ("flextron_budget_choice", "/rows/2/sequence/39/counter_after"),
        ("flextron_sizes", "/rows/9/params_active"),
        ("flextron_sizes", "/rows/20/memory_gib/fp4"),
        ("flextron_budget_loss", "/rows/3/loss"),
        ("flextron_loss_assembly", "/rows/6/total"),
        ("flextron_loss_assembly", "/rows/3/grad_param_loss"),
        ("flextron_loss_assembly", "/plain_script_rows/4/total"),
    ];
    for (kind, place) in places {
        let mut wrong = first_of(kind);
        let number = wrong.json.pointer_mut(place).unwrap_or_else(|| panic!("{kind} has no {place}"));
        *number = (number.as_f64().unwrap() * 1.001 + 1e-3).into();
        assert!(matches!(check(&wrong), Outcome::Failed(_)), "{kind}: a wrong {place} went unnoticed");
    }
    for kind in ["flextron_budget_loss", "flextron_router"] {
        let case = first_of(kind);
        let results: Vec<&String> =
            case.tensors.keys().filter(|name| name.contains(".out.") || name.contains(".grad.")).collect();
        for name in results.iter().step_by(results.len().div_ceil(40)) {
            let mut wrong = case.clone();
            wrong.tensors.get_mut(*name).unwrap().data[0] += 1e-3;
            assert!(matches!(check(&wrong), Outcome::Failed(_)), "{kind}: a wrong {name} went unnoticed");
        }
    }
    let case = first_of("flextron_budget_loss");
    let mut more = case.clone();
    let loss = more.tensors["case0.out.loss"].clone();
    more.tensors.insert("case0.out.other".into(), loss);
    assert!(matches!(check(&more), Outcome::Failed(e) if e == "case0.out.other was not compared"));
}

#[test]
fn goldens_refuse_a_kind_nobody_checks_and_a_result_nobody_compares() {
    let mut unknown = first_of("rmsnorm");
    unknown.kind = "rmsnorm_of_the_future".into();
    assert!(matches!(check(&unknown), Outcome::Failed(e) if e.contains("rmsnorm_of_the_future")));
    let mut more = first_of("rmsnorm");
    let y = more.tensors["out.y"].clone();
    more.tensors.insert("out.z".into(), y);
    assert!(matches!(check(&more), Outcome::Failed(e) if e.contains("out.z was not compared")));
    let mut nan = first_of("attention");
    nan.tensors.get_mut("out.y").unwrap().data[0] = f64::NAN;
    assert!(matches!(check(&nan), Outcome::Failed(e) if e.contains("out.y[0]")));
}
