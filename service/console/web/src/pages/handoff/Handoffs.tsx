export default function Handoffs() { return <h1>Handoffs</h1> }
