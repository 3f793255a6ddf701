pub mod goldens;
pub mod json_schema;
pub mod layouts;
pub mod plugins;
pub mod runs;
pub mod test_host;
