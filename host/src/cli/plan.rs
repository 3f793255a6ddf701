//! `gantry plan`.

use super::{args, print};
use crate::failure::{Failure, Result};
use crate::train::plan::plan;

pub(super) fn run(arguments: args::Plan) -> Result<()> {
    let recipe = arguments.recipe.load(None)?;
    let plugins = super::plugins(&recipe)?;
    let report =
        plan(&recipe, plugins, arguments.ranks.map(|n| n as usize)).map_err(|failure| recipe.locate(failure))?;
    if arguments.json {
        let text = serde_json::to_string_pretty(&report).map_err(|error| Failure::recipe(error.to_string()))?;
        return print(&format!("{text}\n"));
    }
    print(&report.human())
}
