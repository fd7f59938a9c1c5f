export default function Handoff() { return <h1>Handoff</h1> }
